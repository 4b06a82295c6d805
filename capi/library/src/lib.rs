//! `libxseg.so` and `libxseg.a`: the C functions of the crate `xseg-capi` under the name that C programs link.
#![forbid(unsafe_code)]

pub use xseg_capi::*;
