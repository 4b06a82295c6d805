//! PyTorch's filter of a pool: a `std::function<bool(cudaStream_t)>`, which an allocator without a C++ part must call too.
//!
//! GCC's C++ library, which PyTorch is built with on Linux, has it inline in the programs that use it: its layout and the
//! types of its two functions cannot change.

use crate::{throw, xseg_stream};
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::mem::MaybeUninit;

/// What is called, where it is as small, or a pointer to it. Not all of it need be set.
type Functor = [MaybeUninit<*mut c_void>; 2];

// `C-unwind`, since C++ may throw: that ends the process at the wall for panics, where C++ would go on.
type Manager = unsafe extern "C-unwind" fn(to: *mut Functor, from: *const Functor, operation: c_uint) -> bool;
type Invoker = unsafe extern "C-unwind" fn(functor: *const Functor, stream: *mut xseg_stream) -> bool;

/// Operations of a [`Manager`].
const CLONE: c_uint = 2;
const DESTROY: c_uint = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Layout {
    functor: Functor,
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

/// A copy of a function of C++'s.
pub(crate) struct Function {
    functor: Functor,
    manager: Manager,
    invoker: Invoker,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").field("invoker", &self.invoker).finish_non_exhaustive()
    }
}

// SAFETY: the copy is this one's own, and who makes one says that any thread may call and destroy it.
unsafe impl Send for Function {}
// SAFETY: as above; calling it does not change it.
unsafe impl Sync for Function {}

impl Function {
    /// A copy of the function at `from`; `None` where there is none: a null pointer, an empty function, or no GCC's library in
    /// the process, so that `from` is something else.
    ///
    /// # Safety
    /// `from` is null or a `std::function<bool(cudaStream_t)>` of the C++ library in this process. Any thread may call copies
    /// of it, several at once, and destroy them.
    pub(crate) unsafe fn copy(from: *const c_void) -> Option<Self> {
        // What such a function refers to for a call while it is empty; other libraries name it otherwise.
        if from.is_null() || throw::symbol(c"_ZSt25__throw_bad_function_callv").is_none() {
            return None;
        }
        // SAFETY: not null, and the caller's.
        let given = unsafe { from.cast::<Layout>().read() };
        let (manager, invoker) = (given.manager?, given.invoker?);
        let mut functor: Functor = [MaybeUninit::uninit(); 2];
        // SAFETY: a function that is not empty has the manager of what it calls, which copies that to a place without one.
        unsafe { manager(&raw mut functor, from.cast(), CLONE) };
        // What lies in the functor itself may be moved byte by byte, as C++ moves and swaps such functions.
        Some(Self { functor, manager, invoker })
    }

    pub(crate) fn call(&self, mut stream: xseg_stream) -> bool {
        // SAFETY: the invoker of this functor; it takes the argument by reference.
        unsafe { (self.invoker)(&raw const self.functor, &raw mut stream) }
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        let functor = &raw mut self.functor;
        // SAFETY: the manager of this functor, which nobody calls any more.
        unsafe { (self.manager)(functor, functor, DESTROY) };
    }
}
