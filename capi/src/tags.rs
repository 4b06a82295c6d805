//! Tags: what of a device's memory is for what, by the words of the threads that allocate it.

use crate::devices::{forked, watch_forks};
use crate::heap::{place, put};
use crate::noted;
use crate::status::{Failure, guard, xseg_status};
use parking_lot::{Mutex, RwLock};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Different tags of one process.
const TAGS: usize = 1024;

/// Number of a tag.
pub(crate) type Tag = u16;

/// What blocks with a tag take up on one device.
#[derive(Debug, Default)]
struct Counts {
    allocated: AtomicU64,
    peak: AtomicU64,
    live_blocks: AtomicU64,
    allocs: AtomicU64,
}

/// A tag, which is there as long as the process.
#[derive(Debug)]
struct Entry {
    name: CString,
    by_device: [Counts; crate::devices::DEVICES],
}

static ENTRIES: RwLock<Vec<&'static Entry>> = RwLock::new(Vec::new());
/// Held while a tag is looked for and made.
static MAKING: Mutex<()> = Mutex::new(());

thread_local! {
    /// Tags of this thread, the innermost last.
    static CURRENT: RefCell<Vec<Tag>> = const { RefCell::new(Vec::new()) };
}

fn ending() -> Failure {
    Failure::argument("this thread is ending, and has no tags any more")
}

fn entry(tag: Tag) -> Option<&'static Entry> {
    forked().ok()?;
    ENTRIES.read().get(tag as usize).copied()
}

/// The number of a name, made if it is new.
fn number(name: &CStr) -> Result<Tag, Failure> {
    let _making = MAKING.lock();
    let known = ENTRIES.read().iter().position(|entry| entry.name.as_c_str() == name);
    let at = known.unwrap_or_else(|| ENTRIES.read().len());
    if known.is_none() {
        if at == TAGS {
            return Err(Failure::argument(format!("there are {TAGS} different tags already; use fewer names")));
        }
        let by_device = std::array::from_fn(|_| Counts::default());
        // Never freed: threads and blocks refer to it by number.
        ENTRIES.write().push(Box::leak(Box::new(Entry { name: name.to_owned(), by_device })));
    }
    Ok(at as Tag)
}

fn current() -> Option<Tag> {
    // A thread that is ending has no tag any more.
    CURRENT.try_with(|tags| tags.borrow().last().copied()).ok().flatten()
}

fn rounded(requested: u64) -> u64 {
    requested.max(1).next_multiple_of(xseg::units::UNIT)
}

/// Counts a block with the thread's tag, if it has one.
pub(crate) fn up(device: usize, requested: u64) -> Option<Tag> {
    let tag = current()?;
    let counts = entry(tag)?.by_device.get(device)?;
    counts.allocs.fetch_add(1, Relaxed);
    up_again(tag, device, requested);
    Some(tag)
}

/// Counts a block whose free was refused.
pub(crate) fn up_again(tag: Tag, device: usize, requested: u64) {
    if let Some(counts) = entry(tag).and_then(|entry| entry.by_device.get(device)) {
        let bytes = rounded(requested);
        counts.live_blocks.fetch_add(1, Relaxed);
        let now = counts.allocated.fetch_add(bytes, Relaxed) + bytes;
        counts.peak.fetch_max(now, Relaxed);
    }
}

pub(crate) fn down(tag: Tag, device: usize, requested: u64) {
    if let Some(counts) = entry(tag).and_then(|entry| entry.by_device.get(device)) {
        counts.live_blocks.fetch_sub(1, Relaxed);
        counts.allocated.fetch_sub(rounded(requested), Relaxed);
    }
}

/// What blocks with a tag take up on a device. Sizes in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct xseg_tag_figures {
    /// The tag, as text that lives as long as the process.
    pub name: *const c_char,
    /// Bytes in live blocks, rounded to 512 B.
    pub allocated: u64,
    /// Most of them at once.
    pub peak_allocated: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// Allocations so far.
    pub allocs: u64,
}

/// From now on what this thread allocates on devices' heaps has the tag `name`, until `xseg_tag_pop`. Tags nest; the
/// innermost counts. A process has up to 1024 different names. Until the first call tags cost nothing. In a forked child they mean
/// nothing, and this and `xseg_tag_pop` do nothing.
///
/// # Safety
/// `name` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_tag_push(name: *const c_char) -> xseg_status {
    guard(|| {
        place(name.cast_mut(), "name")?;
        watch_forks();
        // A data loader's worker may do as its parent does: nothing is allocated there, and a lock may be that of a thread which it
        // does not have.
        if forked().is_err() {
            return Ok(());
        }
        // SAFETY: not null, and the caller's.
        let tag = number(unsafe { CStr::from_ptr(name) })?;
        noted::want(noted::TAGS);
        CURRENT.try_with(|tags| tags.borrow_mut().push(tag)).map_err(|_| ending())
    })
}

/// Ends the innermost tag of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_tag_pop() -> xseg_status {
    guard(|| {
        if forked().is_err() {
            return Ok(());
        }
        let ended = CURRENT.try_with(|tags| tags.borrow_mut().pop()).map_err(|_| ending())?;
        ended.map(|_| ()).ok_or_else(|| Failure::argument("this thread has no tag to end"))
    })
}

/// The innermost tag of this thread, as text that lives as long as the process; null where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_tag_current() -> *const c_char {
    current().and_then(entry).map_or(std::ptr::null(), |entry| entry.name.as_ptr())
}

/// The figures of every tag on a device, in the order of their first use. `count` gets how many there are; the first
/// `capacity` of them are written to `figures`, which may be null where `capacity` is 0.
///
/// # Safety
/// `figures` is valid for writing `capacity` of them; `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_tags(
    device: c_int,
    figures: *mut xseg_tag_figures,
    capacity: usize,
    count: *mut usize,
) -> xseg_status {
    guard(|| {
        place(count, "count")?;
        if capacity > 0 {
            place(figures, "figures")?;
        }
        forked()?;
        let device = checked(device)?;
        let entries = ENTRIES.read();
        let filled = entries.iter().take(capacity).map(|entry| {
            let counts = &entry.by_device[device];
            let allocated = counts.allocated.load(Relaxed);
            xseg_tag_figures {
                name: entry.name.as_ptr(),
                allocated,
                peak_allocated: counts.peak.load(Relaxed).max(allocated),
                live_blocks: counts.live_blocks.load(Relaxed),
                allocs: counts.allocs.load(Relaxed),
            }
        });
        let filled: Vec<xseg_tag_figures> = filled.collect();
        if capacity > 0 {
            // SAFETY: no more than the caller says there is room for; the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(filled.as_ptr(), figures, filled.len()) };
        }
        // SAFETY: not null, and the caller's.
        unsafe { put(count, entries.len()) };
        Ok(())
    })
}

/// Sets the peaks of all tags on a device to the present values.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_tags_reset_peaks(device: c_int) -> xseg_status {
    guard(|| {
        forked()?;
        let device = checked(device)?;
        for entry in ENTRIES.read().iter() {
            let counts = &entry.by_device[device];
            counts.peak.store(counts.allocated.load(Relaxed), Relaxed);
        }
        Ok(())
    })
}

fn checked(device: c_int) -> Result<usize, Failure> {
    let number = usize::try_from(device).ok().filter(|number| *number < crate::devices::DEVICES);
    number.ok_or_else(|| Failure::argument(format!("device numbers are 0 to {}", crate::devices::DEVICES - 1)))
}
