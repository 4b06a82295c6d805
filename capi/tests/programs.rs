//! The library as C and C++ programs use it: installed, compiled against, and run on host memory.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// Where the library was installed, once for all tests of this file.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed");
        let mut install = Command::new(here().join("install.sh"));
        // The profile of the tests, whose dependencies are there already.
        run(install.arg(&prefix).env("PROFILE", "test").env("CARGO", env!("CARGO")));
        prefix
    })
}

/// A flag of the installed pkg-config file, with its variables filled in.
fn package(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(prefix().join("lib/pkgconfig/xseg.pc")).unwrap();
    let value = |name: &str, mark: char| -> String {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{mark}"))).unwrap();
        line[name.len() + 1..].trim().to_owned()
    };
    let root = value("prefix", '=');
    let folders = ["libdir", "includedir"].map(|folder| (folder, value(folder, '=').replace("${prefix}", &root)));
    let mut flags = value(name, ':');
    for (folder, path) in folders {
        flags = flags.replace(&format!("${{{folder}}}"), &path);
    }
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program against the installed library and runs it.
fn program(source: &str, fixed: bool, env: &[(&str, &str)]) -> String {
    let plus = source.ends_with(".cpp");
    let name = Path::new(source).file_name().unwrap().to_str().unwrap().replace('.', "_");
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}{}", if fixed { "_static" } else { "" }));
    let compiler = std::env::var(if plus { "CXX" } else { "CC" });
    let mut compile = Command::new(compiler.unwrap_or_else(|_| if plus { "c++" } else { "cc" }.into()));
    compile.arg(if plus { "-std=c++17" } else { "-std=c11" }).args(["-Wall", "-Wextra", "-Werror", "-pedantic"]);
    compile.arg("-D_GNU_SOURCE").arg(here().join(source)).args(package("Cflags")).arg("-o").arg(&out);
    if fixed {
        compile.arg(prefix().join("lib/libxseg.a")).args(package("Libs.private"));
    } else {
        compile.args(package("Libs")).arg("-lpthread");
    }
    run(&mut compile);
    let mut command = Command::new(&out);
    command.env("LD_LIBRARY_PATH", prefix().join("lib")).env_remove("XSEG_CONF").envs(env.iter().copied());
    String::from_utf8(run(&mut command).stdout).unwrap()
}

const HOST: [(&str, &str); 1] = [("XSEG_CONF", "backend:host")];

#[test]
fn the_example_in_c() {
    for fixed in [false, true] {
        let said = program("examples/example.c", fixed, &HOST);
        assert!(said.contains("56 MiB live, 64 MiB reserved, 24 MiB moved, 0 bytes copied"), "{said}");
        assert!(said.contains("64 MiB given back"), "{said}");
    }
}

#[test]
fn the_example_in_cpp() {
    let said = program("examples/example.cpp", false, &[]);
    assert!(said.contains("with 32 MiB: out of memory"), "{said}");
    assert!(said.contains("went on with 16 MiB"), "{said}");
    assert!(said.contains("sum 500500, live 1 block"), "{said}");
}

#[test]
fn what_the_interface_promises() {
    program("tests/programs/checks.c", false, &HOST);
}

#[test]
fn a_child_that_is_forked_off() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("forked.trace");
    program("tests/programs/fork.c", false, &[HOST[0], ("TRACE", path.to_str().unwrap())]);
    let text = std::fs::read_to_string(&path).unwrap();
    let kinds: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).map(|line| &line[..3]).collect();
    assert_eq!(kinds, ["a,1", "a,2", "f,1"], "the heap's end ends its recording, and the child adds nothing: {text}");
}

#[test]
fn memory_of_several_processes() {
    program("tests/programs/share.c", false, &[]);
    program("tests/programs/share.cpp", false, &[]);
}

#[test]
fn tickets_for_blocks_of_devices() {
    let small_handles = [("XSEG_CONF", "backend:host,limit:256MiB,handle_max:2MiB,growth:exact")];
    program("tests/programs/tickets.c", false, &small_handles);
}

#[test]
fn an_allocator_hook_throws() {
    program("tests/programs/throws.cpp", false, &[]);
}

#[test]
fn a_pool_hook_throws() {
    program("tests/programs/pools.cpp", false, &HOST);
}

/// A folder with the stand-in for the CUDA driver, compiled once for all tests of this file.
fn stand_in() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand_in");
        std::fs::create_dir_all(&folder).unwrap();
        let mut compile = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into()));
        compile.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "fake_cuda", "-o"]);
        run(compile.arg(folder.join("libcuda.so.1")).arg(here().join("../tests/fake_cuda/lib.rs")));
        folder
    })
}

fn on_stand_in(source: &str, env: &[(&str, &str)]) {
    let found = format!("{}:{}", prefix().join("lib").display(), stand_in().display());
    let conf = ("XSEG_CONF", "backend:cuda,limit:256MiB,reserve:4GiB");
    program(source, false, &[&[conf, ("LD_LIBRARY_PATH", &found)], env].concat());
}

#[test]
fn two_captures_at_once_in_their_pools() {
    on_stand_in("tests/programs/captures.cpp", &[]);
}

#[test]
fn other_devices_get_access() {
    on_stand_in("tests/programs/peers.cpp", &[("FAKE_CUDA_DEVICES", "4"), ("FAKE_CUDA_FAR", "2")]);
}

#[test]
fn the_library_has_its_name() {
    let library = std::fs::read_link(prefix().join("lib/libxseg.so")).unwrap();
    assert_eq!(library.to_str().unwrap(), "libxseg.so.0");
    let bytes = std::fs::read(prefix().join("lib/libxseg.so")).unwrap();
    assert!(bytes.windows(13).any(|part| part == b"libxseg.so.0\0"), "the name for the loader");
}

#[test]
fn tags_and_recordings() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recorded.trace");
    program("tests/programs/notes.c", false, &[HOST[0], ("TRACE", path.to_str().unwrap())]);
    let text = std::fs::read_to_string(&path).unwrap();
    let events: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let (untimed, times): (Vec<&str>, Vec<&str>) = events.iter().map(|line| line.rsplit_once(',').unwrap()).unzip();
    assert_eq!(untimed, ["a,1,7340032,0", "a,2,5000,7", "u,2,9", "f,1", "f,2", "a,3,2097152,0"]);
    assert!(times.iter().map(|time| time.parse::<u64>().unwrap()).is_sorted());
    assert!(text.starts_with("# recorded by xseg ") && text.lines().nth(1).unwrap().contains("\"backend\": \"host\""));
}

#[test]
fn a_file_takes_one_recording() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shared.trace");
    program("tests/programs/record.c", false, &[HOST[0], ("TRACE", path.to_str().unwrap())]);
}

#[test]
fn a_folder_that_pkg_config_cannot_name_is_refused() {
    for name in ["/no such/folder", "/no'such", "/no$such", "/no&such"] {
        let output = Command::new(here().join("install.sh")).arg(name).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && said.contains("pkg-config cannot name"), "{name}: {said}");
    }
}
