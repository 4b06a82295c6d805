//! The tests' side of the stand-in driver: starting a process on it, steering it, reading its books.

#![allow(dead_code, reason = "not every test binary needs all")]

use libloading::Library;
use std::path::{Path, PathBuf};
use std::process::Command;

const MARK: &str = "XSEG_ON_STAND_IN";

/// Runs `body` in a process of its own on a stand-in with the variables of `env` and without the
/// symbols of `without`. `test` is the name of the calling test.
pub(crate) fn on_stand_in(test: &str, env: &[(&str, &str)], without: &[&str], body: impl FnOnce(&Control)) {
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return body(&Control::load("libcuda.so"));
    }
    again(test, folder(without).path(), env);
}

/// As [`on_stand_in`], with an NVTX library beside the driver, which `body` gets as the second one.
pub(crate) fn on_stand_in_with_nvtx(test: &str, env: &[(&str, &str)], body: impl FnOnce(&Control, &Control)) {
    const NVTX: &str = "libnvToolsExt.so.1";
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return body(&Control::load("libcuda.so"), &Control::load(NVTX));
    }
    let folder = folder(&[]);
    // A file of its own, so that it is a library of its own.
    std::fs::copy(folder.path().join("libcuda.so"), folder.path().join(NVTX)).unwrap();
    again(test, folder.path(), env);
}

/// A folder with the stand-in, without some symbols, under the driver's names.
pub(crate) fn folder(without: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut image = std::fs::read(stand_in(folder.path())).unwrap();
    for name in without {
        hide(&mut image, name);
    }
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path().join(name), &image).unwrap();
    }
    folder
}

/// Runs `body` in a process of its own that finds no driver in front of the system's.
pub(crate) fn without_driver(test: &str, body: impl FnOnce()) {
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return body();
    }
    let folder = tempfile::tempdir().unwrap();
    again(test, folder.path(), &[]);
}

/// Runs one test of this binary again, with `folder` before the system's libraries.
fn again(test: &str, folder: &Path, env: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(MARK, test)
        .env("LD_LIBRARY_PATH", folder)
        .env_remove("LD_PRELOAD")
        .envs(env.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

/// The stand-in as `cargo test` built it beside the tests; where only this test was built, it is
/// compiled into `folder`.
fn stand_in(folder: &Path) -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let built = executable.ancestors().nth(2).unwrap().join("examples/libfake_cuda.so");
    if built.exists() {
        return built;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda/lib.rs");
    let target = folder.join("built.so");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "fake_cuda", "-o"])
        .args([&target, &source])
        .status()
        .unwrap();
    assert!(status.success(), "the stand-in driver does not compile");
    target
}

/// Takes a symbol out of a library's image: its name is spoilt where the loader compares it.
fn hide(image: &mut [u8], name: &str) {
    let sought: Vec<u8> = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for at in 0..image.len().saturating_sub(sought.len()) {
        if image[at..at + sought.len()] == sought {
            image[at + 1] = b'_';
            found += 1;
        }
    }
    assert!(found > 0, "the stand-in has no {name}");
}

/// The stand-in that this process has loaded.
#[derive(Debug)]
pub(crate) struct Control(Library);

macro_rules! controls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $symbol:literal;)*) => {
        $($(#[$doc])*
        pub(crate) fn $name(&self $(, $argument: $kind)*) $(-> $result)? {
            // SAFETY: the stand-in's function of this name has this signature.
            let function = unsafe { self.0.get::<extern "C" fn($($kind),*) $(-> $result)?>($symbol) }.unwrap();
            function($($argument),*)
        })*
    };
}

impl Control {
    fn load(name: &str) -> Self {
        // SAFETY: the stand-in runs nothing when loaded.
        Self(unsafe { Library::new(name) }.unwrap())
    }

    controls! {
        /// Lets the turn-th call from now fail (0: none).
        fn fail_at(turn: u64, code: u32) = b"fake_fail_at\0";
        /// Lets every call fail from now on (0: none).
        fn break_all(code: u32) = b"fake_break\0";
        /// Has no call failed yet since `fail_at`?
        fn fail_pending() -> bool = b"fake_fail_pending\0";
        fn count(what: u32) -> u64 = b"fake_count\0";
        fn clear_log() = b"fake_log_clear\0";
        fn hold_events(hold: bool) = b"fake_hold_events\0";
        fn busy(device: i32) = b"fake_busy\0";
        fn start_capture(stream: u64) -> bool = b"fake_capture\0";
        /// Devices, by bit, that may access the mapping at an address.
        fn access(address: u64) -> u64 = b"fake_access\0";
        fn capture_mode() -> u32 = b"fake_capture_mode\0";
        fn copy_log(to: *mut u8, length: usize) -> usize = b"fake_log\0";
        fn raw_current(context: *mut u64) -> u32 = b"cuCtxGetCurrent\0";
        fn raw_push(context: u64) -> u32 = b"cuCtxPushCurrent_v2\0";
        fn raw_pop(context: *mut u64) -> u32 = b"cuCtxPopCurrent_v2\0";
        fn raw_mode(mode: *mut u32) -> u32 = b"cuThreadExchangeStreamCaptureMode\0";
        fn raw_create_stream(stream: *mut u64, flags: u32) -> u32 = b"cuStreamCreate\0";
        fn raw_create_event(event: *mut u64, flags: u32) -> u32 = b"cuEventCreate\0";
        fn raw_record(event: u64, stream: u64) -> u32 = b"cuEventRecord\0";
        fn raw_destroy_event(event: u64) -> u32 = b"cuEventDestroy_v2\0";
        fn raw_destroy_stream(stream: u64) -> u32 = b"cuStreamDestroy_v2\0";
    }

    /// Handles, mappings, reservations, events and retained contexts that exist.
    pub(crate) fn counts(&self) -> [u64; 5] {
        [0, 1, 2, 3, 4].map(|what| self.count(what))
    }

    pub(crate) fn accessible(&self) -> u64 {
        self.count(6)
    }

    /// The calls so far, one a line: name, arguments (hexadecimal), ` = `, result (decimal).
    pub(crate) fn log(&self) -> Vec<String> {
        let mut text = vec![0u8; 1 << 20];
        let length = self.copy_log(text.as_mut_ptr(), text.len());
        text.truncate(length);
        String::from_utf8(text).unwrap().lines().map(String::from).collect()
    }

    pub(crate) fn current(&self) -> u64 {
        let mut context = 0;
        self.raw_current(&raw mut context);
        context
    }

    pub(crate) fn push(&self, context: u64) {
        assert_eq!(self.raw_push(context), 0);
    }

    pub(crate) fn pop_all(&self) {
        let mut context = 0;
        while self.raw_pop(&raw mut context) == 0 {}
    }

    pub(crate) fn set_capture_mode(&self, mode: u32) {
        let mut mode = mode;
        assert_eq!(self.raw_mode(&raw mut mode), 0);
    }

    /// A graph is being captured from `stream`, from now on.
    pub(crate) fn capture(&self, stream: u64) {
        assert!(!self.start_capture(stream));
    }

    /// Ends the capture and says whether something broke it.
    pub(crate) fn end_capture(&self) -> bool {
        self.start_capture(0)
    }

    /// A stream that waits for the legacy one, and it for it.
    pub(crate) fn create_blocking_stream(&self) -> u64 {
        let mut stream = 0;
        assert_eq!(self.raw_create_stream(&raw mut stream, 0), 0);
        stream
    }

    /// A new event, recorded on a stream. A context is current.
    pub(crate) fn recorded_event(&self, stream: u64) -> u64 {
        let mut event = 0;
        assert_eq!(self.raw_create_event(&raw mut event, 2), 0);
        assert_eq!(self.raw_record(event, stream), 0);
        event
    }

    pub(crate) fn create_stream(&self) -> u64 {
        let mut stream = 0;
        assert_eq!(self.raw_create_stream(&raw mut stream, 1), 0);
        stream
    }

    pub(crate) fn destroy_stream(&self, stream: u64) {
        assert_eq!(self.raw_destroy_stream(stream), 0);
    }
}
