//! The picture of memory that `Heap::layout` gives, against the figures of the same heap.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use xseg::units::MIB;
use xseg::{Heap, PoolId, RegionState, StreamFilter, StreamId};

fn bytes(heap: &Heap, state: RegionState) -> u64 {
    heap.layout().iter().filter(|region| region.state == state).map(|region| region.bytes).sum()
}

#[test]
fn regions_add_up_to_the_figures() {
    let heap = Heap::builder().conf("backend:sim,limit:128MiB").unwrap().build().unwrap();
    let (main, side) = (StreamId(0), StreamId(7));
    let blocks: Vec<_> = (0..16).map(|_| heap.alloc(4 * MIB - 300, main).unwrap()).collect();
    let small = heap.alloc(1000, side).unwrap();
    heap.begin_capture(PoolId(1, 2), StreamFilter::Streams(vec![side])).unwrap();
    let captured = heap.alloc(3 * MIB, side).unwrap();
    heap.end_capture(PoolId(1, 2)).unwrap();
    drop(blocks.into_iter().step_by(2).collect::<Vec<_>>());
    let layout = heap.layout();
    for pair in layout.windows(2) {
        assert!(pair[0].address + pair[0].bytes <= pair[1].address, "{pair:?}");
    }
    let stats = heap.stats();
    assert_eq!(bytes(&heap, RegionState::Live), stats.allocated);
    assert_eq!(bytes(&heap, RegionState::Free), stats.free);
    assert_eq!(layout.iter().map(|region| region.requested).sum::<u64>(), stats.requested);
    assert_eq!(layout.iter().map(|region| region.bytes).sum::<u64>(), stats.reserved + stats.zombie);
    let at = |address: u64| *layout.iter().find(|region| region.address == address).unwrap();
    let found = at(small.address());
    assert_eq!((found.bytes, found.requested, found.stream, found.pool), (1024, 1000, Some(side), None));
    assert!(found.small);
    let found = at(captured.address());
    assert_eq!((found.pool, found.small, found.state), (Some(PoolId(1, 2)), false, RegionState::Live));
}

#[test]
fn waiting_blocks_are_shown() {
    let heap = Heap::builder().conf("backend:sim,limit:128MiB").unwrap().build().unwrap();
    let block = heap.alloc(4 * MIB, StreamId(0)).unwrap();
    let address = block.address();
    block.record_use(StreamId(9)).unwrap();
    drop(block);
    let state = heap.layout().iter().find(|region| region.address == address).map(|region| region.state);
    // Statistics do deferred work, so that what has passed is free by then.
    assert!(matches!(state, Some(RegionState::Pending | RegionState::Free)), "{state:?}");
    let _ = heap.stats();
    assert_eq!(bytes(&heap, RegionState::Pending), 0);
    assert_eq!(bytes(&heap, RegionState::Live), 0);
}
