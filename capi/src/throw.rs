//! A C++ exception from code that is not C++: what a pluggable allocator must throw when it has no memory, because
//! PyTorch does not look at what it returns.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::OnceLock;

/// Functions of the C++ library that the process has loaded.
#[derive(Debug)]
struct Runtime {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    construct: unsafe extern "C" fn(*mut c_void, *const c_char),
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !,
    kind: usize,
    destroy: usize,
}

/// `sizeof(std::runtime_error)`: a table pointer and the text's, by the Itanium ABI.
const BYTES: usize = 2 * size_of::<usize>();

fn runtime() -> Option<&'static Runtime> {
    static FOUND: OnceLock<Option<Runtime>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let (allocate, throw) = (symbol(c"__cxa_allocate_exception")?, symbol(c"__cxa_throw")?);
        let construct = symbol(c"_ZNSt13runtime_errorC1EPKc")?;
        let (kind, destroy) = (symbol(c"_ZTISt13runtime_error")?, symbol(c"_ZNSt13runtime_errorD1Ev")?);
        Some(Runtime {
            // SAFETY: the Itanium C++ ABI gives this function this type.
            allocate: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> *mut c_void>(allocate)
            },
            // SAFETY: so is the constructor of `std::runtime_error` from a `const char*`.
            construct: unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char)>(construct)
            },
            // SAFETY: as for `allocate`; it unwinds.
            throw: unsafe {
                std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !,
                >(throw)
            },
            kind: kind.expose_provenance(),
            destroy: destroy.expose_provenance(),
        })
    });
    found.as_ref()
}

/// What a C++ library of the process has of this name.
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a name that ends with a zero byte; looked for in what the process has loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found).or_else(|| {
        // Python loads extensions for themselves alone, and the C++ library with them.
        // SAFETY: both names end with a zero byte; a library that is there already is only counted.
        let library = unsafe { libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the library stays loaded, for nobody closes this handle.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    })
}

/// Throws `std::runtime_error(text)`; returns only where no C++ library is loaded.
///
/// # Safety
/// The caller's frames up to the catching one may be unwound: they are `C-unwind`, or C++'s.
pub(crate) unsafe fn runtime_error(text: &str) {
    let Some(runtime) = runtime() else { return };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: memory for an exception of this size; it ends the process rather than return null.
    let exception = unsafe { (runtime.allocate)(BYTES) };
    // SAFETY: the memory is the object's, and the text is copied.
    unsafe { (runtime.construct)(exception, text.as_ptr()) };
    drop(text);
    let (kind, destroy) = (runtime.kind, runtime.destroy);
    let kind = std::ptr::with_exposed_provenance_mut(kind);
    // SAFETY: a whole object of that type with its destructor; the caller lets the frames be unwound.
    unsafe { (runtime.throw)(exception, kind, std::ptr::with_exposed_provenance_mut(destroy)) }
}
