//! Gives the shared library its name for the loader.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let abi = env!("CARGO_PKG_VERSION_MAJOR");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libxseg.so.{abi}");
    }
}
