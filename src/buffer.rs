//! [`DeviceBuffer`]: memory of a heap that `cudarc` takes where it takes a `CudaSlice` by its traits.

use crate::backend::{BackendKind, StreamId};
use crate::error::{DriverCall, DriverError, Error, Result};
use crate::heap::{Allocation, Heap};
use cudarc::driver::{
    CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
    ValidAsZeroBits,
};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

/// `len` elements of device memory, allocated for one stream and freed on it when dropped.
///
/// ```no_run
/// use xseg::{DeviceBuffer, Heap};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let heap = Heap::builder().conf("backend:cuda=0")?.build()?;
/// // The same device; opened after the heap, which says clearly where there is no driver.
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let mut buffer = DeviceBuffer::<f32>::zeros(&heap, &stream, 1024)?;
/// stream.memcpy_htod(&[1.0f32; 1024], &mut buffer)?;
/// assert_eq!(stream.clone_dtoh(&buffer)?[7], 1.0);
/// # Ok(())
/// # }
/// ```
///
/// Copies, cuBLAS and everything else that takes `cudarc`'s [`DevicePtr`] or [`DevicePtrMut`] take it.
/// As with `cudarc`'s own buffers, use through these traits on *another* stream is ordered after the
/// work before it and before the work after it while the context manages streams
/// (`CudaContext::is_managing_stream_synchronization`), and the heap is told, so that the memory is
/// not reused before that stream has passed; of a stream of another GPU the host waits for the end of each use. As a bare kernel argument (`LaunchArgs::arg`) it is
/// ordered on its own stream only: call [`DeviceBuffer::use_on`] before launching on another.
///
/// Any thread may use it. Two guards of different streams held at once order only the later use.
pub struct DeviceBuffer<T> {
    // Dropped first: the free is ordered on the stream, which still exists then.
    allocation: Allocation,
    address: u64,
    len: usize,
    stream: Arc<CudaStream>,
    /// Recorded after each use on another stream.
    elsewhere: OnceLock<CudaEvent>,
    elements: PhantomData<T>,
}

fn id(stream: &CudaStream) -> StreamId {
    StreamId(stream.cu_stream().expose_provenance() as u64)
}

/// `cudarc`'s error asks the driver for a text when it is formatted; its code does not.
fn refused(error: cudarc::driver::DriverError) -> Error {
    Error::Driver(DriverError::new(DriverCall::Other, format!("{:?}", error.0)))
}

impl<T: DeviceRepr> DeviceBuffer<T> {
    /// Allocates without writing anything. Any thread; never copies or waits, but for the heap's last
    /// resort (see [`Heap::alloc`]).
    ///
    /// # Errors
    /// As [`Heap::alloc`]; [`Error::InvalidArgument`] for a heap that is not on the `cuda` backend or not on the
    /// stream's device, when the size in bytes overflows, or for elements aligned to more than 2 MiB.
    ///
    /// # Safety
    /// Nothing reads an element before it was written.
    pub unsafe fn uninit(heap: &Heap, stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        if heap.backend().kind() != BackendKind::Cuda {
            return Err(Error::InvalidArgument("a DeviceBuffer needs a heap on the cuda backend".into()));
        }
        let (of_heap, of_stream) = (heap.backend().device(), stream.context().ordinal());
        if usize::try_from(of_heap) != Ok(of_stream) {
            let why =
                format!("the heap is on device {of_heap} and the stream on device {of_stream}; give one of the heap's");
            return Err(Error::InvalidArgument(why));
        }
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| Error::InvalidArgument(format!("{len} elements exceed all memory")))?;
        let allocation = heap.alloc_aligned(bytes, align_of::<T>() as u64, id(stream))?;
        let address = allocation.address();
        let stream = stream.clone();
        Ok(Self { allocation, address, len, stream, elsewhere: OnceLock::new(), elements: PhantomData })
    }

    /// Allocates and queues writing zeros.
    ///
    /// # Errors
    /// As [`DeviceBuffer::uninit`], and when the driver refuses the write.
    pub fn zeros(heap: &Heap, stream: &Arc<CudaStream>, len: usize) -> Result<Self>
    where
        T: ValidAsZeroBits,
    {
        // SAFETY: every element is written next, in stream order.
        let mut buffer = unsafe { Self::uninit(heap, stream, len) }?;
        if len > 0 {
            stream.memset_zeros(&mut buffer).map_err(refused)?;
        }
        Ok(buffer)
    }

    /// Allocates and queues a copy of `elements`.
    ///
    /// # Errors
    /// As [`DeviceBuffer::uninit`], and when the driver refuses the copy.
    pub fn from_host(heap: &Heap, stream: &Arc<CudaStream>, elements: &[T]) -> Result<Self> {
        // SAFETY: every element is written next, in stream order.
        let mut buffer = unsafe { Self::uninit(heap, stream, elements.len()) }?;
        if !elements.is_empty() {
            stream.memcpy_htod(elements, &mut buffer).map_err(refused)?;
        }
        Ok(buffer)
    }

    /// Copies to the host, after all earlier work of the buffer's stream, and waits for that.
    ///
    /// # Errors
    /// When the driver refuses the copy, or earlier work failed.
    pub fn to_host(&self) -> Result<Vec<T>> {
        if self.len == 0 {
            return Ok(Vec::new());
        }
        let elements = self.stream.clone_dtoh(self).map_err(refused)?;
        self.stream.synchronize().map_err(refused)?;
        Ok(elements)
    }
}

impl<T> DeviceBuffer<T> {
    /// First address on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The block of the heap.
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Orders work that `stream` is given from now on after the buffer's earlier work, and tells the
    /// heap of that use. For bare kernel arguments; the traits of `cudarc` do it themselves. Later
    /// work of the buffer's own stream is *not* made to wait for `stream`.
    ///
    /// # Errors
    /// When the driver refuses, or `stream` is dead.
    pub fn use_on(&self, stream: &CudaStream) -> Result<()> {
        if self.is_foreign(stream) {
            self.told_of(stream)?;
            stream.join(&self.stream).map_err(refused)?;
        }
        if let Some(event) = self.elsewhere.get() {
            stream.wait(event).map_err(refused)?;
        }
        Ok(())
    }

    /// Is it another stream than the buffer's? The default streams of all devices have the same handle.
    fn is_foreign(&self, stream: &CudaStream) -> bool {
        id(stream) != id(&self.stream) || stream.context().ordinal() != self.stream.context().ordinal()
    }

    fn told_of(&self, stream: &CudaStream) -> Result<()> {
        let device = u32::try_from(stream.context().ordinal());
        let device = device.map_err(|error| Error::InvalidArgument(format!("the stream's device: {error}")))?;
        self.allocation.record_use_on(id(stream), device)
    }

    /// The order that `cudarc`'s traits promise; failures surface at the context's next call, as theirs do.
    fn ordered<'a>(&'a self, stream: &'a CudaStream) -> SyncOnDrop<'a> {
        let context = stream.context();
        let foreign = self.is_foreign(stream);
        let told = !foreign || self.told_of(stream).is_ok();
        // Of a use that the heap knows nothing of, the host waits for the end.
        let unordered = if told { SyncOnDrop::Record(None) } else { SyncOnDrop::Sync(Some(stream)) };
        if !context.is_managing_stream_synchronization() {
            return unordered;
        }
        if let Some(event) = self.elsewhere.get() {
            context.record_err(stream.wait(event));
        }
        if !foreign {
            return SyncOnDrop::Record(None);
        }
        context.record_err(stream.join(&self.stream));
        if !told {
            return unordered;
        }
        if context.ordinal() != self.stream.context().ordinal() {
            // An event is of one device: the host waits for the end instead.
            return SyncOnDrop::Sync(Some(stream));
        }
        if self.elsewhere.get().is_none() {
            match context.new_event(None) {
                // A second thread's may have come first: then that one is used.
                Ok(event) => drop(self.elsewhere.set(event)),
                Err(error) => {
                    context.record_err::<()>(Err(error));
                    return SyncOnDrop::Sync(Some(stream));
                }
            }
        }
        SyncOnDrop::Record(self.elsewhere.get().map(|event| (event, stream)))
    }
}

impl<T> DeviceSlice<T> for DeviceBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for DeviceBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, self.ordered(stream))
    }
}

impl<T> DevicePtrMut<T> for DeviceBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, self.ordered(stream))
    }
}

// SAFETY: pushes the address, a 64-bit number that lives as long as the buffer is borrowed.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceBuffer<T>) -> &mut Self {
        self.arg(&arg.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBuffer<T>) -> &mut Self {
        self.arg(&arg.address)
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} elements of {} B in {:?})", self.len, size_of::<T>(), self.allocation)
    }
}
