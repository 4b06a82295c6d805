//! The defragmentation suite: `cargo bench --bench defrag -- --help` lists its options, which are those of `xseg bench`.

fn main() -> std::process::ExitCode {
    xseg::cli::bench_main(env!("CARGO_TARGET_TMPDIR"))
}
