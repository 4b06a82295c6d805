//! Faults on a tiny memory, which the tests of the replay use too.

use super::*;
use crate::backend::timeline::Timeline;
use crate::backend::{BackendKind, Capabilities, MemoryInfo};
use crate::error::DriverCall;
use crate::units::GRANULE;

/// Memory by handle and offset, bytes that were never written being zero.
#[derive(Debug, Default)]
struct Pages {
    handles: HashMap<u64, HashMap<u64, u8>>,
    mappings: BTreeMap<u64, (u64, u64)>,
    next: u64,
}

/// A backend with a tiny memory of its own.
#[derive(Debug, Default)]
pub(crate) struct FakeBackend {
    pages: Mutex<Pages>,
    clock: Timeline,
    capabilities: Capabilities,
}

impl FakeBackend {
    pub(crate) fn new(clock: &Timeline) -> Self {
        Self { clock: clock.clone(), ..Self::default() }
    }

    fn place(pages: &Pages, address: u64) -> Option<(u64, u64)> {
        let (at, (handle, bytes)) = pages.mappings.range(..=address).next_back()?;
        (address - at < *bytes).then_some((*handle, address - at))
    }

    pub(crate) fn get(&self, address: u64) -> Option<u8> {
        let pages = self.pages.lock();
        let (handle, offset) = Self::place(&pages, address)?;
        Some(pages.handles[&handle].get(&offset).copied().unwrap_or(0))
    }

    pub(crate) fn put(&self, address: u64, byte: u8) -> Option<()> {
        let mut pages = self.pages.lock();
        let (handle, offset) = Self::place(&pages, address)?;
        pages.handles.get_mut(&handle)?.insert(offset, byte);
        Some(())
    }
}

impl Backend for FakeBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn memory(&self) -> Result<MemoryInfo, DriverError> {
        Ok(MemoryInfo { free: u64::MAX, total: u64::MAX })
    }
    fn reserve(&self, _bytes: u64) -> Result<u64, DriverError> {
        Ok(GRANULE)
    }
    unsafe fn unreserve(&self, _address: u64, _bytes: u64) -> Result<(), DriverError> {
        Ok(())
    }
    fn create(&self, _bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let mut pages = self.pages.lock();
        pages.next += 1;
        let handle = pages.next;
        pages.handles.insert(handle, HashMap::new());
        Ok(PhysicalAllocation(handle))
    }
    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut pages = self.pages.lock();
        assert!(pages.handles.contains_key(&handle.0));
        assert_eq!(pages.mappings.insert(address, (handle.0, bytes)), None);
        Ok(())
    }
    unsafe fn set_access(&self, _address: u64, _bytes: u64) -> Result<(), DriverError> {
        Ok(())
    }
    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mapping = self.pages.lock().mappings.remove(&address);
        let right = mapping.is_some_and(|mapping| mapping.1 == bytes);
        if right { Ok(()) } else { Err(DriverError::new(DriverCall::Unmap, "no such mapping")) }
    }
    unsafe fn release(&self, _handle: PhysicalAllocation, _bytes: u64) -> Result<(), DriverError> {
        Ok(())
    }
    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        Ok(self.clock.record(scope))
    }
    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        Ok(self.clock.is_done(event))
    }
    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        Ok(self.clock.wait(event, limit))
    }
    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.clock.stream_wait(stream, event);
        Ok(())
    }
    fn recycle(&self, event: Event) {
        self.clock.recycle(event);
    }
    fn quiesce(&self) -> Result<(), DriverError> {
        self.clock.quiesce();
        Ok(())
    }
    fn now(&self) -> Duration {
        self.clock.now()
    }
}

const GONE: u8 = u8::MAX;

/// Maps `count` granules with their number written at the start; what is found there afterwards.
fn marks(fault: Option<Fault>, count: u64) -> (Vec<u8>, u64) {
    let fake = Arc::new(FakeBackend::default());
    let backend = InjectBackend::new(fake.clone(), fault);
    for number in 1..=count {
        let handle = backend.create(GRANULE).unwrap();
        // SAFETY: each granule is mapped once.
        unsafe { backend.map(number * GRANULE, handle, GRANULE) }.unwrap();
        // SAFETY: it was mapped in the line above.
        unsafe { backend.set_access(number * GRANULE, GRANULE) }.unwrap();
        fake.put(number * GRANULE, number as u8).unwrap();
    }
    let found = (1..=count).map(|number| fake.get(number * GRANULE).unwrap_or(GONE)).collect();
    (found, backend.injected())
}

#[test]
fn faults_hit_mappings_that_hold_data() {
    assert_eq!(marks(None, 5), (vec![1, 2, 3, 4, 5], 0));
    assert_eq!(marks(Some(Fault::Swap), 5), (vec![2, 1, 3, 4, 5], 1));
    assert_eq!(marks(Some(Fault::Lost), 5), (vec![0, 2, 3, 4, 5], 1));
    assert_eq!(marks(Some(Fault::Lost), 40).1, 3);
    assert_eq!(marks(Some(Fault::EarlyUnmap), 5), (vec![GONE, 2, 3, 4, 5], 1));
}

#[test]
fn names_follow_the_memory_after_a_fault() {
    let fake = Arc::new(FakeBackend::default());
    let backend = InjectBackend::new(fake.clone(), Some(Fault::Swap));
    let handles: Vec<_> = (0..4).map(|_| backend.create(GRANULE).unwrap()).collect();
    for (number, handle) in (1..).zip(&handles) {
        // SAFETY: each granule is mapped once.
        unsafe { backend.map(number * GRANULE, *handle, GRANULE) }.unwrap();
        // SAFETY: it was mapped in the line above.
        unsafe { backend.set_access(number * GRANULE, GRANULE) }.unwrap();
    }
    assert_eq!(backend.injected(), 1);
    fake.put(GRANULE, 77).unwrap();
    // SAFETY: granule 1 is mapped, granule 9 is not.
    unsafe { backend.relocate(GRANULE, 9 * GRANULE, handles[0], GRANULE) }.unwrap();
    assert_eq!((fake.get(9 * GRANULE), fake.get(GRANULE)), (Some(77), None));
}

#[test]
fn a_mapping_that_went_early_can_still_be_moved_and_unmapped() {
    let fake = Arc::new(FakeBackend::default());
    let backend = InjectBackend::new(fake.clone(), Some(Fault::EarlyUnmap));
    let handles: Vec<_> = (0..20).map(|_| backend.create(GRANULE).unwrap()).collect();
    for (number, handle) in (1..).zip(&handles) {
        // SAFETY: each granule is mapped once.
        unsafe { backend.map(number * GRANULE, *handle, GRANULE) }.unwrap();
        // SAFETY: it was mapped in the line above.
        unsafe { backend.set_access(number * GRANULE, GRANULE) }.unwrap();
    }
    let gone: Vec<u64> = (1..=20).filter(|number| fake.get(number * GRANULE).is_none()).collect();
    assert_eq!(gone.len(), 2);
    let (moved, unmapped) = (gone[0], gone[1]);
    // SAFETY: mapped, as far as the caller knows; granule 99 is not.
    unsafe { backend.relocate(moved * GRANULE, 99 * GRANULE, handles[moved as usize - 1], GRANULE) }.unwrap();
    assert_eq!(fake.get(99 * GRANULE), Some(0));
    // SAFETY: mapped, as far as the caller knows.
    unsafe { backend.unmap(unmapped * GRANULE, GRANULE) }.unwrap();
    // SAFETY: unmapped in the line above.
    unsafe { backend.map(unmapped * GRANULE, handles[unmapped as usize - 1], GRANULE) }.unwrap();
    assert_eq!(fake.get(unmapped * GRANULE), Some(0));
}

#[test]
fn early_events_and_clock_hooks() {
    let clock = Timeline::new(Duration::from_millis(1));
    let backend = InjectBackend::new(Arc::new(FakeBackend::new(&clock)), Some(Fault::EarlyUnmap));
    let event = backend.record(EventScope::Context).unwrap();
    assert_eq!((backend.is_done(&event), clock.is_done(&event)), (Ok(true), false));
    backend.recycle(event);
    let calls = Arc::new(Mutex::new(0));
    let counter = calls.clone();
    let backend = InjectBackend::new(Arc::new(FakeBackend::new(&clock)), None).on_clock(move || *counter.lock() += 1);
    let event = backend.record(EventScope::Context).unwrap();
    assert_eq!(backend.is_done(&event), Ok(false));
    assert_eq!(backend.wait(&event, Duration::from_secs(1)), Ok(true));
    assert_eq!((*calls.lock(), clock.now()), (1, Duration::from_millis(1)));
    backend.recycle(event);
}
