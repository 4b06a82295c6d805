//! NVTX, as `libnvToolsExt.so.1` exports it: the same image serves as that library.

use crate::state::lock;
use std::ffi::{CStr, c_char};

/// # Safety
/// `text` ends with zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvtxRangePushA(text: *const c_char) -> i32 {
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    lock().log.push(format!("push {text}"));
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvtxRangePop() -> i32 {
    lock().log.push("pop".into());
    0
}
