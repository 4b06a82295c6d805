//! `include/xseg.h` is what cbindgen makes of this crate, and C and C++ take it.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

const HEAD: &str = "\
/* xseg: an allocator for GPU memory that defragments by remapping pages. The C interface.
 *
 * Generated from the crate xseg-capi; after a change there:
 *     XSEG_WRITE_HEADER=1 cargo test -p xseg-capi --test header
 *
 * Every function that can fail returns an xseg_status and leaves what it was to fill untouched on an error; the
 * sentence for it is xseg_last_error(). Any thread may call any function, where its text does not say otherwise.
 * In a forked child every call on a heap of the parent's gives XSEG_UNAVAILABLE; a heap that the child makes is for one
 * thread of it.
 * The functions with `torch` in their names are for PyTorch's CUDAPluggableAllocator.
 */";

fn generated() -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        usize_is_size_t: true,
        style: cbindgen::Style::Both,
        documentation_style: cbindgen::DocumentationStyle::C99,
        include_guard: Some("XSEG_H".into()),
        header: Some(HEAD.into()),
        no_includes: true,
        sys_includes: vec!["stddef.h".into(), "stdint.h".into()],
        line_length: 120,
        ..cbindgen::Config::default()
    };
    config.export.exclude = vec!["xseg_heap".into()];
    config.after_includes = Some("\n// A heap: a number in a pointer's clothes. The library looks it up and never follows it.\ntypedef struct xseg_heap xseg_heap;".into());
    config.enumeration.enum_class = false;
    let bindings =
        cbindgen::Builder::new().with_crate(env!("CARGO_MANIFEST_DIR")).with_config(config).generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    // Rust's headings say nothing in C.
    String::from_utf8(text).unwrap().replace("// # Safety\n", "// What the caller promises:\n")
}

#[test]
fn the_header_is_current() {
    let path = root().join("include/xseg.h");
    let generated = generated();
    if std::env::var_os("XSEG_WRITE_HEADER").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == generated,
        "include/xseg.h is not current: XSEG_WRITE_HEADER=1 cargo test -p xseg-capi --test header"
    );
}

#[test]
fn the_header_has_every_function() {
    let header = std::fs::read_to_string(root().join("include/xseg.h")).unwrap();
    let mut functions = 0;
    for entry in std::fs::read_dir(root().join("capi/src")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for part in text.split("#[unsafe(no_mangle)]").skip(1) {
            let name = part.split("fn ").nth(1).unwrap().split('(').next().unwrap();
            assert!(header.contains(&format!("{name}(")), "{name} is not in the header");
            functions += 1;
        }
    }
    assert!(functions > 40, "{functions} functions were found");
}
