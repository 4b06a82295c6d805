//! The `xseg` command; see `xseg --help`.

fn main() -> std::process::ExitCode {
    xseg::cli::main()
}
