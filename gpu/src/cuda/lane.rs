//! A worker's way from files to devices: small pinned buffers, and a stream for each device.

use super::context::Context;
use super::driver::{CudaError, check};
use super::region::{Region, copy_2d};
use crate::MemoryError;
use crate::region::Rows;
use cudarc::driver::sys;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use weightd_core::content::DeviceUuid;

/// Host memory that devices read directly. It is small, and faulted in before it is registered,
/// since that is faster (128 MiB on an H200 host: 15 ms and 2 ms with large pages; registering fresh
/// pages 34 ms).
#[derive(Debug)]
pub(crate) struct Staging {
    start: NonNull<c_void>,
    bytes: usize,
    registered: Option<Arc<Context>>,
}

impl Staging {
    /// Takes memory and faults it in, which needs no driver.
    pub fn fault_in(bytes: usize) -> Result<Staging, MemoryError> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        let start = start.map_err(MemoryError::system("mmap of staging memory"))?;
        let start = NonNull::new(start).ok_or_else(|| MemoryError::system("mmap")(Errno::FAULT))?;
        // Larger pages where the system gives them; it is only a wish.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { mm::madvise(start.as_ptr(), bytes, Advice::LinuxHugepage) };
        // SAFETY: as above; faults pages in for writing and changes no byte (Linux 5.14). Where the
        // kernel does not know it, registering faults them in.
        let _ = unsafe { mm::madvise(start.as_ptr(), bytes, Advice::LinuxPopulateWrite) };
        let registered = None;
        Ok(Staging {
            start,
            bytes,
            registered,
        })
    }

    /// Pins it, for every device.
    pub fn register(&mut self, device: DeviceUuid) -> Result<(), MemoryError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        // SAFETY: the range is this value's own mapping, which outlives the registration.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(self.start.as_ptr(), self.bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })?;
        self.registered = Some(context);
        Ok(())
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(context) = &self.registered
            && let Ok(_entered) = context.enter()
        {
            // SAFETY: registered once, and lanes have waited for all copies before they let go of it.
            let _ = unsafe { sys::cuMemHostUnregister(self.start.as_ptr()) };
        }
        // SAFETY: the mapping is this value's own; lanes that use it hold it.
        let _ = unsafe { mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}

// SAFETY: the memory is bound to no thread.
unsafe impl Send for Staging {}
// SAFETY: shared only to keep it alive; each lane has a part to itself.
unsafe impl Sync for Staging {}

/// One worker's buffers and streams.
#[derive(Debug)]
pub(crate) struct Lane {
    buffers: Vec<Buffer>,
    current: usize,
    streams: Vec<Stream>,
    /// Keeps the buffers' memory, until every stream is done with it.
    _staging: Arc<Staging>,
}

#[derive(Debug)]
struct Buffer {
    /// Inside the staging memory, and in no other buffer.
    start: NonNull<u8>,
    bytes: usize,
    /// One for each stream: recorded when the stream was given copies from this buffer.
    events: Vec<Event>,
}

#[derive(Debug)]
struct Stream {
    context: Arc<Context>,
    device: DeviceUuid,
    stream: sys::CUstream,
    /// Whether it was given copies from the current buffer.
    used: bool,
}

#[derive(Debug)]
struct Event {
    event: sys::CUevent,
    recorded: bool,
}

impl Lane {
    /// Cuts `staging` into lanes of `buffers` buffers of `bytes` bytes each.
    ///
    /// # Panics
    /// When the staging memory is smaller than that.
    pub fn open(
        staging: &Arc<Staging>,
        devices: &[DeviceUuid],
        lanes: usize,
        buffers: usize,
        bytes: usize,
    ) -> Result<Vec<Lane>, CudaError> {
        let wanted = lanes
            .checked_mul(buffers)
            .and_then(|buffers| buffers.checked_mul(bytes));
        assert!(
            wanted.is_some_and(|wanted| wanted <= staging.bytes),
            "staging memory for {lanes} lanes"
        );
        (0..lanes)
            .map(|lane| {
                let mut streams = Vec::new();
                for &device in devices {
                    streams.push(Stream::new(device)?);
                }
                let mut lane_buffers = Vec::new();
                for buffer in 0..buffers {
                    let offset = (lane * buffers + buffer) * bytes;
                    // SAFETY: the offset is inside the staging memory, as asserted above.
                    let start = unsafe { staging.start.cast::<u8>().add(offset) };
                    let events = streams.iter().map(Event::new).collect::<Result<_, _>>()?;
                    lane_buffers.push(Buffer { start, bytes, events });
                }
                let _staging = Arc::clone(staging);
                Ok(Lane {
                    buffers: lane_buffers,
                    current: 0,
                    streams,
                    _staging,
                })
            })
            .collect()
    }

    /// The next buffer, once all copies from it are done.
    ///
    /// # Errors
    /// The lane is of no more use then: what its buffers are used for is not known.
    pub fn next_buffer(&mut self) -> Result<&mut [u8], CudaError> {
        let current = &mut self.buffers[self.current];
        for (stream, event) in self.streams.iter_mut().zip(&mut current.events) {
            if stream.used {
                let _entered = stream.context.enter()?;
                // SAFETY: event and stream belong to the same context, which is current.
                check("cuEventRecord", unsafe {
                    sys::cuEventRecord(event.event, stream.stream)
                })?;
                (stream.used, event.recorded) = (false, true);
            }
        }
        self.current = (self.current + 1) % self.buffers.len();
        let next = &mut self.buffers[self.current];
        for (stream, event) in self.streams.iter().zip(&mut next.events) {
            if event.recorded {
                let _entered = stream.context.enter()?;
                // SAFETY: the event was recorded; waits until the copies before it are done.
                check("cuEventSynchronize", unsafe {
                    sys::cuEventSynchronize(event.event)
                })?;
                event.recorded = false;
            }
        }
        // SAFETY: the memory is this buffer's alone, is as large as that, and holds initialized bytes
        // (fresh pages are zero). No device reads it any more: every stream that was given copies from
        // it has an event recorded behind them (a failure above keeps `used` or `recorded`, so that a
        // later call waits or fails too), and all those events have come.
        Ok(unsafe { std::slice::from_raw_parts_mut(next.start.as_ptr(), next.bytes) })
    }

    /// The current buffer.
    pub fn buffer(&self) -> &[u8] {
        let buffer = &self.buffers[self.current];
        // SAFETY: as in `next_buffer`; devices only read it.
        unsafe { std::slice::from_raw_parts(buffer.start.as_ptr(), buffer.bytes) }
    }

    /// Starts a copy from the current buffer. The caller has checked the bounds of the region.
    pub fn write(
        &mut self,
        device: DeviceUuid,
        region: &Region,
        offset: u64,
        from: Range<usize>,
    ) -> Result<(), CudaError> {
        let source = self.buffer()[from].as_ptr_range();
        let bytes = source.end as usize - source.start as usize;
        let (stream, context) = self.stream(device)?;
        let _entered = context.enter()?;
        // SAFETY: the source is pinned memory of the current buffer, which is not given out again
        // before the event that is recorded behind this copy; the destination is inside the region.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(region.address() + offset, source.start.cast(), bytes, stream)
        })
    }

    /// Starts a copy of rows of the current buffer, from byte `from` on. The caller has checked that
    /// all rows are in the buffer and in the region.
    pub fn write_rows(
        &mut self,
        device: DeviceUuid,
        region: &Region,
        from: usize,
        rows: &Rows,
    ) -> Result<(), CudaError> {
        let copy = copy_2d(self.buffer()[from..].as_ptr(), region.address(), rows);
        let (stream, context) = self.stream(device)?;
        let _entered = context.enter()?;
        // SAFETY: as in `write`, for every row.
        check("cuMemcpy2DAsync", unsafe {
            sys::cuMemcpy2DAsync_v2(&copy, stream)
        })
    }

    /// Waits until everything has arrived, on every stream; then the first failure counts.
    pub fn finish(&mut self) -> Result<(), CudaError> {
        let wait = |stream: &Stream| {
            let _entered = stream.context.enter()?;
            // SAFETY: the stream is this lane's own.
            check("cuStreamSynchronize", unsafe {
                sys::cuStreamSynchronize(stream.stream)
            })
        };
        self.streams.iter().map(wait).fold(Ok(()), Result::and)
    }

    /// The stream of a device, which is about to be given a copy from the current buffer.
    fn stream(&mut self, device: DeviceUuid) -> Result<(sys::CUstream, Arc<Context>), CudaError> {
        let stream = self.streams.iter_mut().find(|stream| stream.device == device);
        let stream = stream.ok_or(CudaError::NotVisible { uuid: device })?;
        stream.used = true;
        Ok((stream.stream, Arc::clone(&stream.context)))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Devices must be done with the buffers before their memory can go.
        let _ = self.finish();
        for event in self.buffers.iter().flat_map(|buffer| &buffer.events) {
            // SAFETY: the event is this lane's own.
            let _ = unsafe { sys::cuEventDestroy_v2(event.event) };
        }
        for stream in &self.streams {
            // SAFETY: the stream is this lane's own, and idle.
            let _ = unsafe { sys::cuStreamDestroy_v2(stream.stream) };
        }
    }
}

// SAFETY: its pointers lead into memory that only this lane uses, and handles of the driver may be
// used from any thread.
unsafe impl Send for Lane {}

impl Stream {
    fn new(device: DeviceUuid) -> Result<Stream, CudaError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` takes a handle.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, flags)
        })?;
        Ok(Stream {
            context,
            device,
            stream,
            used: false,
        })
    }
}

impl Event {
    fn new(stream: &Stream) -> Result<Event, CudaError> {
        let _entered = stream.context.enter()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: `event` takes a handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Event {
            event,
            recorded: false,
        })
    }
}
