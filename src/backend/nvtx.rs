//! Ranges for NVIDIA's profilers (NVTX) around what the heap does slowly, where the library is installed and
//! `nvtx:on` asks for it. Without either, a range costs one branch.

use std::ffi::CStr;
#[cfg(feature = "cuda")]
use std::ffi::{c_char, c_int};
use std::marker::PhantomData;

/// The library's calls, if they are to be made.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Nvtx(#[cfg(feature = "cuda")] Option<&'static Calls>);

#[cfg(feature = "cuda")]
#[derive(Debug)]
struct Calls {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
    /// Keeps the functions where they are.
    _library: libloading::Library,
}

/// A range of the calling thread, which ends when this is dropped.
#[derive(Debug)]
#[must_use = "the range ends when this is dropped"]
pub(crate) struct Range(#[cfg(feature = "cuda")] Option<&'static Calls>, PhantomData<*const ()>);

impl Nvtx {
    /// No ranges.
    pub(crate) const fn off() -> Self {
        Self(
            #[cfg(feature = "cuda")]
            None,
        )
    }

    /// Looks for the library, once per process.
    ///
    /// # Errors
    /// Why there will be no ranges, in words.
    #[cfg(feature = "cuda")]
    pub(crate) fn load() -> Result<Self, String> {
        static CALLS: std::sync::OnceLock<Result<Calls, String>> = std::sync::OnceLock::new();
        CALLS.get_or_init(Calls::open).as_ref().map(|calls| Self(Some(calls))).map_err(Clone::clone)
    }

    /// There are no ranges in a build without the `cuda` feature.
    ///
    /// # Errors
    /// Always, in words.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn load() -> Result<Self, String> {
        Err("xseg was built without the `cuda` feature".into())
    }

    /// Begins a range of this thread.
    pub(crate) fn range(self, name: &'static CStr) -> Range {
        #[cfg(feature = "cuda")]
        if let Some(calls) = self.0 {
            // SAFETY: the library reads a text that ends with zero.
            unsafe { (calls.push)(name.as_ptr()) };
        }
        #[cfg(not(feature = "cuda"))]
        let _ = name;
        Range(
            #[cfg(feature = "cuda")]
            self.0,
            PhantomData,
        )
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(calls) = self.0 {
            // SAFETY: ends the range that this thread began last: ranges are not sent and end in turn.
            unsafe { (calls.pop)() };
        }
    }
}

#[cfg(feature = "cuda")]
impl Calls {
    fn open() -> Result<Self, String> {
        // The library of CUDA up to 12, and the one that exports the same calls since.
        let mut failure = String::new();
        let library =
            ["libnvToolsExt.so.1", "libnvtx3interop.so.1", "libnvtx3interop.so"].into_iter().find_map(|name| {
                // SAFETY: the library's constructors have no conditions.
                let loaded = unsafe { libloading::Library::new(name) };
                loaded.map_err(|error| failure = error.to_string()).ok()
            });
        let library = library.ok_or_else(|| format!("the NVTX library cannot be loaded ({failure})"))?;
        // SAFETY: NVTX declares `int nvtxRangePushA(const char *)`.
        let push = unsafe { library.get::<unsafe extern "C" fn(*const c_char) -> c_int>(b"nvtxRangePushA\0") };
        let push = *push.map_err(|error| error.to_string())?;
        // SAFETY: NVTX declares `int nvtxRangePop(void)`.
        let pop = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvtxRangePop\0") };
        let pop = *pop.map_err(|error| error.to_string())?;
        Ok(Self { push, pop, _library: library })
    }
}
