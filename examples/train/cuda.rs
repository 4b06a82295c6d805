//! The operations on a GPU: products by cuBLAS, the rest by the kernels of `kernels.cu`, all on one
//! stream, on memory of a heap or of the driver.

use super::maths::{Maths, Product, Result, Shape, Step};
use super::memory::{Plain, Tally};
use cudarc::cublas::{CudaBlas, result as blas, sys as blas_sys};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, LaunchConfig,
    PushKernelArg, SyncOnDrop,
};
use cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::sync::Arc;
use xseg::{DeviceBuffer, Heap};

const KERNELS: [&str; 12] = [
    "embed",
    "embed_back_table",
    "embed_back_places",
    "rms_norm",
    "rms_norm_back",
    "rms_norm_back_gain",
    "relu",
    "relu_back",
    "softmax",
    "softmax_back",
    "cross_entropy",
    "adam",
];
/// Threads of a block.
const THREADS: u32 = 128;
/// Threads of a warp, which works on a row.
const WARP: usize = 32;
/// What cuBLAS advises for Hopper: 32 MiB.
const WORKSPACE: usize = (32 << 20) / size_of::<f32>();

/// `cudarc`'s error asks the driver for a text when it is formatted; its code does not.
fn refused(error: DriverError) -> String {
    format!("the driver refused: {:?}", error.0)
}

/// Where [`CudaMaths`] takes its memory from.
pub(crate) trait Source {
    type Buffer: DevicePtr<f32> + DevicePtrMut<f32>;

    fn alloc(&self, stream: &Arc<CudaStream>, count: usize) -> Result<Self::Buffer>;
}

impl Source for Heap {
    type Buffer = DeviceBuffer<f32>;

    fn alloc(&self, stream: &Arc<CudaStream>, count: usize) -> Result<Self::Buffer> {
        // SAFETY: the model writes every number before it reads it.
        Ok(unsafe { DeviceBuffer::uninit(self, stream, count) }?)
    }
}

/// The driver's memory, counted while it lives.
pub(crate) struct Counted {
    numbers: CudaSlice<f32>,
    _tally: Tally,
}

impl DeviceSlice<f32> for Counted {
    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.numbers.stream()
    }
}

impl DevicePtr<f32> for Counted {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        self.numbers.device_ptr(stream)
    }
}

impl DevicePtrMut<f32> for Counted {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        self.numbers.device_ptr_mut(stream)
    }
}

impl Source for Plain {
    type Buffer = Counted;

    fn alloc(&self, stream: &Arc<CudaStream>, count: usize) -> Result<Counted> {
        // SAFETY: the model writes every number before it reads it.
        let numbers = unsafe { stream.alloc(count) }.map_err(refused)?;
        Ok(Counted { numbers, _tally: self.count((count * size_of::<f32>()) as u64) })
    }
}

/// A GPU with the kernels.
pub(crate) struct Gpu {
    stream: Arc<CudaStream>,
    kernels: HashMap<&'static str, CudaFunction>,
}

impl Gpu {
    /// Opens a device by its number; says what is missing where there is none.
    pub(crate) fn open(index: u32) -> Result<Self> {
        // Without a driver `cudarc` panics; this asks first.
        xseg::backend::cuda::driver_info()?;
        // SAFETY: loads a library, whose initialisers may run as at any other load.
        if !unsafe { blas_sys::is_culib_present() } {
            return Err("libcublas.so is not found; put its folder into LD_LIBRARY_PATH".into());
        }
        let context = CudaContext::new(index as usize).map_err(refused)?;
        let module = context.load_module(Ptx::from_src(include_str!("kernels.ptx"))).map_err(refused)?;
        let mut kernels = HashMap::new();
        for name in KERNELS {
            kernels.insert(name, module.load_function(name).map_err(refused)?);
        }
        Ok(Self { stream: context.new_stream().map_err(refused)?, kernels })
    }
}

/// See the module's text.
pub(crate) struct CudaMaths<'a, S: Source> {
    gpu: &'a Gpu,
    source: S,
    // Before the workspace, which it uses until it is gone.
    blas: CudaBlas,
    _workspace: S::Buffer,
}

/// What a kernel is given.
#[derive(Debug, Clone, Copy)]
enum Argument {
    Address(u64),
    Count(i64),
    Number(f32),
}

fn number(count: usize) -> Argument {
    Argument::Count(count as i64)
}

impl<'a, S: Source> CudaMaths<'a, S> {
    /// With a cuBLAS of its own, whose workspace comes from `source` too.
    pub(crate) fn new(gpu: &'a Gpu, source: S) -> Result<Self> {
        let mut workspace = source.alloc(&gpu.stream, WORKSPACE)?;
        let blas = CudaBlas::new(gpu.stream.clone())?;
        // The same bits in every run: one stream, one workspace, no atomics, no TF32 (the default).
        let atomics = blas_sys::cublasAtomicsMode_t::CUBLAS_ATOMICS_NOT_ALLOWED;
        // SAFETY: the handle lives.
        unsafe { blas_sys::cublasSetAtomicsMode(*blas.handle(), atomics) }.result()?;
        let address = workspace.device_ptr_mut(&gpu.stream).0 as *mut _;
        // SAFETY: memory of this size that lives as long as the handle and that nothing else uses.
        unsafe { blas_sys::cublasSetWorkspace_v2(*blas.handle(), address, WORKSPACE * size_of::<f32>()) }.result()?;
        Ok(Self { gpu, source, blas, _workspace: workspace })
    }

    /// The address of a buffer. All work is on the buffer's own stream: there is nothing to order.
    fn at(&self, buffer: &S::Buffer) -> Argument {
        Argument::Address(self.address(buffer))
    }

    fn address(&self, buffer: &S::Buffer) -> u64 {
        buffer.device_ptr(&self.gpu.stream).0
    }

    /// Launches with at least so many threads.
    fn launch(&self, name: &'static str, threads: usize, arguments: &[Argument]) -> Result<()> {
        let function = self.gpu.kernels.get(name).ok_or("no such kernel")?;
        let mut launch = self.gpu.stream.launch_builder(function);
        for argument in arguments {
            match argument {
                Argument::Address(address) => launch.arg(address),
                Argument::Count(count) => launch.arg(count),
                Argument::Number(number) => launch.arg(number),
            };
        }
        let blocks = u32::try_from(threads.div_ceil(THREADS as usize))?;
        let size = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of the kernel; the addresses are of live buffers of this stream,
        // as large as the counts beside them say.
        unsafe { launch.launch(size) }.map_err(refused)?;
        Ok(())
    }
}

impl<S: Source> Maths for CudaMaths<'_, S> {
    type Buffer = S::Buffer;

    fn alloc(&self, count: usize) -> Result<S::Buffer> {
        self.source.alloc(&self.gpu.stream, count)
    }

    fn zeros(&self, count: usize) -> Result<S::Buffer> {
        let mut buffer = self.alloc(count)?;
        self.gpu.stream.memset_zeros(&mut buffer).map_err(refused)?;
        Ok(buffer)
    }

    fn upload(&self, numbers: &[f32]) -> Result<S::Buffer> {
        let mut buffer = self.alloc(numbers.len())?;
        self.gpu.stream.memcpy_htod(numbers, &mut buffer).map_err(refused)?;
        Ok(buffer)
    }

    fn download(&self, from: &S::Buffer) -> Result<Vec<f32>> {
        let numbers = self.gpu.stream.clone_dtoh(from).map_err(refused)?;
        self.gpu.stream.synchronize().map_err(refused)?;
        Ok(numbers)
    }

    fn copy(&self, from: &S::Buffer, to: &mut S::Buffer) -> Result<()> {
        Ok(self.gpu.stream.memcpy_dtod(from, to).map_err(refused)?)
    }

    fn multiply(&self, product: &Product, a: &S::Buffer, b: &S::Buffer, c: &mut S::Buffer) -> Result<()> {
        let side = |place: usize, buffer: &S::Buffer| {
            let address = self.address(buffer) + (product.first[place] * size_of::<f32>()) as u64;
            Ok::<_, std::num::TryFromIntError>((
                std::ptr::without_provenance_mut::<f32>(address as usize),
                i32::try_from(product.lead[place])?,
                product.stride[place] as i64,
            ))
        };
        let ((a, lead_a, stride_a), (b, lead_b, stride_b), (c, lead_c, stride_c)) =
            (side(0, a)?, side(1, b)?, side(2, c)?);
        let [rows, columns, inner, count] =
            [product.rows, product.columns, product.inner, product.count].map(i32::try_from);
        let operation = |transposed: bool| match transposed {
            true => blas_sys::cublasOperation_t::CUBLAS_OP_T,
            false => blas_sys::cublasOperation_t::CUBLAS_OP_N,
        };
        // cuBLAS stores by columns, where each of these matrices is its transpose: C' = op(B)' op(A)'.
        let (first, second) = (operation(product.transposed[1]), operation(product.transposed[0]));
        // SAFETY: the buffers are live, of this stream, and as large as the product says.
        unsafe {
            blas::sgemm_strided_batched(
                *self.blas.handle(),
                first,
                second,
                columns?,
                rows?,
                inner?,
                &raw const product.alpha,
                b,
                lead_b,
                stride_b,
                a,
                lead_a,
                stride_a,
                &raw const product.beta,
                c,
                lead_c,
                stride_c,
                count?,
            )
        }?;
        Ok(())
    }

    fn embed(
        &self,
        shape: Shape,
        tokens: &S::Buffer,
        [table, places]: [&S::Buffer; 2],
        out: &mut S::Buffer,
    ) -> Result<()> {
        let Shape { rows, width, length, .. } = shape;
        let buffers = [self.at(tokens), self.at(table), self.at(places), self.at(out)];
        self.launch("embed", rows * width, &[&buffers[..], &[rows, width, length].map(number)].concat())
    }

    fn embed_back(
        &self,
        shape: Shape,
        tokens: &S::Buffer,
        gradient: &S::Buffer,
        [table, places]: [&mut S::Buffer; 2],
    ) -> Result<()> {
        let Shape { rows, width, length, vocabulary } = shape;
        let buffers = [self.at(tokens), self.at(gradient), self.at(table)];
        let counts = [rows, width, vocabulary].map(number);
        self.launch("embed_back_table", vocabulary * width, &[&buffers[..], &counts].concat())?;
        let buffers = [self.at(gradient), self.at(places)];
        let counts = [rows, width, length].map(number);
        self.launch("embed_back_places", length * width, &[&buffers[..], &counts].concat())
    }

    fn norm(
        &self,
        shape: Shape,
        x: &S::Buffer,
        gain: &S::Buffer,
        y: &mut S::Buffer,
        scale: &mut S::Buffer,
    ) -> Result<()> {
        let buffers = [self.at(x), self.at(gain), self.at(y), self.at(scale)];
        let counts = [shape.rows, shape.width].map(number);
        self.launch("rms_norm", shape.rows * WARP, &[&buffers[..], &counts].concat())
    }

    fn norm_back(
        &self,
        shape: Shape,
        [x, gain, scale]: [&S::Buffer; 3],
        dy: &S::Buffer,
        dx: &mut S::Buffer,
        dgain: &mut S::Buffer,
    ) -> Result<()> {
        let counts = [shape.rows, shape.width].map(number);
        let buffers = [self.at(x), self.at(gain), self.at(scale), self.at(dy), self.at(dx)];
        self.launch("rms_norm_back", shape.rows * WARP, &[&buffers[..], &counts].concat())?;
        let buffers = [self.at(x), self.at(scale), self.at(dy), self.at(dgain)];
        self.launch("rms_norm_back_gain", shape.width, &[&buffers[..], &counts].concat())
    }

    fn relu(&self, count: usize, x: &mut S::Buffer) -> Result<()> {
        self.launch("relu", count, &[self.at(x), number(count)])
    }

    fn relu_back(&self, count: usize, y: &S::Buffer, gradient: &mut S::Buffer) -> Result<()> {
        self.launch("relu_back", count, &[self.at(y), self.at(gradient), number(count)])
    }

    fn softmax(&self, rows: usize, length: usize, scores: &mut S::Buffer) -> Result<()> {
        self.launch("softmax", rows * WARP, &[self.at(scores), number(rows), number(length)])
    }

    fn softmax_back(&self, rows: usize, length: usize, chances: &S::Buffer, gradient: &mut S::Buffer) -> Result<()> {
        let arguments = [self.at(chances), self.at(gradient), number(rows), number(length)];
        self.launch("softmax_back", rows * WARP, &arguments)
    }

    fn cross_entropy(
        &self,
        shape: Shape,
        logits: &mut S::Buffer,
        targets: &S::Buffer,
        losses: &mut S::Buffer,
    ) -> Result<()> {
        let buffers = [self.at(logits), self.at(targets), self.at(losses)];
        let counts = [shape.rows, shape.vocabulary].map(number);
        self.launch("cross_entropy", shape.rows * WARP, &[&buffers[..], &counts].concat())
    }

    fn adam(
        &self,
        step: Step,
        weights: &mut S::Buffer,
        gradient: &S::Buffer,
        [first, second]: [&mut S::Buffer; 2],
    ) -> Result<()> {
        let [left, right] = step.corrections.map(Argument::Number);
        let rate = Argument::Number(step.rate);
        let buffers = [self.at(weights), self.at(gradient), self.at(first), self.at(second)];
        self.launch("adam", step.count, &[&buffers[..], &[number(step.count), rate, left, right]].concat())
    }
}
