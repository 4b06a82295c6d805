//! Memory of the host backend: mappings really move, rules are enforced, the VMA budget holds.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::{Backend, PhysicalAllocation, StreamId};
use xseg::error::{DriverCall, DriverError};
use xseg::units::{GIB, GRANULE, KIB};

const G: u64 = GRANULE;

fn open(options: HostOptions) -> HostBackend {
    HostBackend::new(options).unwrap()
}

/// Backends whose moves take either way.
fn both_ways() -> [HostBackend; 2] {
    [false, true].map(|double_map| open(HostOptions { double_map, ..HostOptions::default() }))
}

fn map(backend: &HostBackend, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: the backend checks the range itself; no test uses an address that it has unmapped.
    unsafe { backend.map(address, handle, bytes) }?;
    // SAFETY: mapped in the line above.
    unsafe { backend.set_access(address, bytes) }
}

fn unmap(backend: &HostBackend, address: u64, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: no work is queued.
    unsafe { backend.unmap(address, bytes) }
}

fn relocate(
    backend: &HostBackend,
    from: u64,
    to: u64,
    handle: PhysicalAllocation,
    bytes: u64,
) -> Result<(), DriverError> {
    // SAFETY: the backend checks the ranges itself; no work is queued.
    unsafe { backend.relocate(from, to, handle, bytes) }.map_err(|unmoved| unmoved.error)
}

fn release(backend: &HostBackend, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: the backend checks the handle itself.
    unsafe { backend.release(handle, bytes) }
}

fn unreserve(backend: &HostBackend, address: u64, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: no test uses an address that it has given back.
    unsafe { backend.unreserve(address, bytes) }
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn bytes_at(backend: &HostBackend, address: u64, bytes: usize) -> Vec<u8> {
    let mut seen = vec![0; bytes];
    backend.read(address, &mut seen).unwrap();
    seen
}

/// VMAs of the kernel's own list for a reservation, with the guards on either side.
fn kernel_pieces(base: u64, bytes: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().map(|line| line.split_once(' ').unwrap().0.split_once('-').unwrap());
    let hex = |text| u64::from_str_radix(text, 16).unwrap();
    ranges.filter(|(start, end)| hex(start) <= base + bytes && hex(end) >= base).count() as u64
}

#[test]
fn data_follows_a_relocation() {
    for backend in both_ways() {
        let base = backend.reserve(64 * G).unwrap();
        assert_eq!(base % G, 0);
        let other = backend.create(G).unwrap();
        let handle = backend.create(3 * G).unwrap();
        map(&backend, base, other, G).unwrap();
        map(&backend, base + G, handle, 3 * G).unwrap();
        let written = pattern(5, 3 * G as usize);
        backend.write(base + G, &written).unwrap();

        relocate(&backend, base + G, base + 40 * G, handle, 3 * G).unwrap();
        assert!(backend.is_mapped(base + 40 * G, 3 * G) && !backend.is_mapped(base + 3 * G, 1));
        assert!(bytes_at(&backend, base + 40 * G, 3 * G as usize) == written);
        let error = backend.read(base + G, &mut [0; 4]).unwrap_err();
        assert_eq!((error.address, error.reason.as_str()), (base + G, "not mapped"));

        // The bytes are in the handle's pages, whatever the page table says.
        // SAFETY: nobody writes to the handle while the view exists.
        let view = unsafe { backend.view_physical(handle, G, 2 * G as usize) }.unwrap();
        assert!(view[..] == written[G as usize..]);
        // SAFETY: as above.
        assert!(unsafe { backend.view_physical(handle, 2 * G, 2 * G as usize) }.is_err());
    }
}

#[test]
fn a_relocation_of_what_is_not_accessible_yet_makes_it_so() {
    for backend in both_ways() {
        let base = backend.reserve(8 * G).unwrap();
        let handle = backend.create(G).unwrap();
        // SAFETY: a free place of the reservation.
        unsafe { backend.map(base, handle, G) }.unwrap();
        assert!(!backend.is_mapped(base, G) && backend.write(base, &[1]).is_err());
        relocate(&backend, base, base + 4 * G, handle, G).unwrap();
        backend.write(base + 4 * G, &[9]).unwrap();
        unmap(&backend, base + 4 * G, G).unwrap();
        assert!(unmap(&backend, base, G).is_err());
    }
}

#[test]
fn one_handle_at_two_addresses() {
    for backend in both_ways() {
        let base = backend.reserve(16 * G).unwrap();
        let handle = backend.create(2 * G).unwrap();
        map(&backend, base, handle, 2 * G).unwrap();
        map(&backend, base + 8 * G, handle, 2 * G).unwrap();
        backend.write(base + G, &[1, 2, 3]).unwrap();
        backend.write(base + 9 * G + 3, &[4, 5]).unwrap();
        assert_eq!(bytes_at(&backend, base + 9 * G, 5), [1, 2, 3, 4, 5]);
        assert_eq!(bytes_at(&backend, base + G, 5), [1, 2, 3, 4, 5]);
        relocate(&backend, base, base + 4 * G, handle, 2 * G).unwrap();
        unmap(&backend, base + 8 * G, 2 * G).unwrap();
        assert_eq!(bytes_at(&backend, base + 5 * G, 5), [1, 2, 3, 4, 5]);
    }
}

#[test]
fn two_partly_live_handles_are_joined() {
    let backend = open(HostOptions::default());
    let base = backend.reserve(16 * G).unwrap();
    let (left, right) = (backend.create(4 * G).unwrap(), backend.create(4 * G).unwrap());
    map(&backend, base, left, 4 * G).unwrap();
    map(&backend, base + 4 * G, right, 4 * G).unwrap();
    backend.write(base, &pattern(1, G as usize)).unwrap();
    backend.write(base + 7 * G, &pattern(2, G as usize)).unwrap();
    // The idle tail of `right` is in front of the idle head of `left` when mapped the other way round.
    map(&backend, base + 8 * G, right, 4 * G).unwrap();
    map(&backend, base + 12 * G, left, 4 * G).unwrap();
    let joined = pattern(3, 2 * G as usize);
    backend.write(base + 13 * G, &joined).unwrap();
    assert!(bytes_at(&backend, base + G, 2 * G as usize) == joined);
    assert!(bytes_at(&backend, base, G as usize) == pattern(1, G as usize));
    assert!(bytes_at(&backend, base + 7 * G, G as usize) == pattern(2, G as usize));
}

#[test]
fn memory_is_freed_with_the_last_mapping_of_a_released_handle() {
    let backend = open(HostOptions { total: Some(8 * G), ..HostOptions::default() });
    let base = backend.reserve(16 * G).unwrap();
    let handle = backend.create(2 * G).unwrap();
    assert_eq!(backend.resident().unwrap(), 0, "untouched memory costs nothing");
    map(&backend, base, handle, 2 * G).unwrap();
    map(&backend, base + 4 * G, handle, 2 * G).unwrap();
    backend.write(base, &pattern(0, 2 * G as usize)).unwrap();
    assert_eq!(backend.resident().unwrap(), 2 * G);
    release(&backend, handle, 2 * G).unwrap();
    assert!(map(&backend, base + 8 * G, handle, 2 * G).is_err(), "a released handle takes no mapping");
    unmap(&backend, base, 2 * G).unwrap();
    assert_eq!(backend.memory().unwrap().free, 6 * G);
    assert_eq!(backend.resident().unwrap(), 2 * G);
    assert_eq!(bytes_at(&backend, base + 4 * G, 8), pattern(0, 8));
    unmap(&backend, base + 4 * G, 2 * G).unwrap();
    assert_eq!(backend.memory().unwrap().free, 8 * G);
    assert_eq!(backend.resident().unwrap(), 0);
}

#[test]
fn the_nominal_total_holds() {
    let backend = open(HostOptions { total: Some(4 * G), ..HostOptions::default() });
    let handles = [3 * G, G].map(|bytes| (backend.create(bytes).unwrap(), bytes));
    let error = backend.create(G).unwrap_err();
    assert!(error.out_of_memory && error.call == DriverCall::Create);
    release(&backend, handles[0].0, handles[0].1).unwrap();
    assert_eq!(backend.memory().unwrap().free, 3 * G);
    // Far more than the machine has, since nothing is written.
    let large = open(HostOptions::default()).create(900 * GIB).unwrap();
    assert_eq!(large, PhysicalAllocation(1));
}

#[test]
fn broken_rules_are_refused_and_change_nothing() {
    let backend = open(HostOptions::default());
    let base = backend.reserve(8 * G).unwrap();
    let (one, two) = (backend.create(G).unwrap(), backend.create(2 * G).unwrap());
    map(&backend, base, one, G).unwrap();
    map(&backend, base + 2 * G, two, 2 * G).unwrap();
    backend.write(base, &[7]).unwrap();
    backend.write(base + 3 * G, &[8]).unwrap();
    let before = (backend.mapping_budget(), backend.leaks());

    let refusals = [
        backend.reserve(G + 4096).map(drop),
        backend.reserve(0).map(drop),
        backend.create(0).map(drop),
        backend.create(G - 1).map(drop),
        map(&backend, base, one, G),                // over a mapping
        map(&backend, base + G, two, 2 * G),        // partly over a mapping
        map(&backend, base + 4 * G, two, G),        // part of a handle
        map(&backend, base + 4 * G + 4096, one, G), // off the grid
        map(&backend, base + 7 * G, two, 2 * G),    // past the end of the reservation
        map(&backend, base + 4 * G, PhysicalAllocation(99), G),
        unmap(&backend, base + 2 * G, G), // part of a mapping
        unmap(&backend, base + 3 * G, G),
        unmap(&backend, base, 2 * G),
        unmap(&backend, base + 5 * G, G),
        release(&backend, PhysicalAllocation(99), G),
        release(&backend, two, G),
        relocate(&backend, base, base + 3 * G, one, G), // onto a mapping
        relocate(&backend, base + 2 * G, base + 3 * G, two, 2 * G), // onto itself
        relocate(&backend, base, base + 5 * G, two, 2 * G), // another handle
        unreserve(&backend, base, 8 * G),               // with mappings
        unreserve(&backend, base, 4 * G),
    ];
    for (index, refusal) in refusals.into_iter().enumerate() {
        let error = refusal.expect_err(&format!("rule {index}"));
        assert!(!error.out_of_memory && error.mapping_limit.is_none(), "{error}");
    }
    assert_eq!((backend.mapping_budget(), backend.leaks()), before);
    assert_eq!((bytes_at(&backend, base, 1), bytes_at(&backend, base + 3 * G, 1)), (vec![7], vec![8]));
}

#[test]
fn an_orderly_end_leaves_nothing() {
    let backend = open(HostOptions::default());
    let base = backend.reserve(8 * G).unwrap();
    let handle = backend.create(G).unwrap();
    map(&backend, base, handle, G).unwrap();
    assert_eq!(backend.leaks().to_string(), "1 reservations, 1 mappings, 1 handles, 0 events");
    release(&backend, handle, G).unwrap();
    unmap(&backend, base, G).unwrap();
    unreserve(&backend, base, 8 * G).unwrap();
    assert!(backend.leaks().is_empty());
    assert_eq!(backend.mapping_budget().0, 0);
    assert!(backend.write(base, &[0]).unwrap_err().reason.contains("outside"));
}

#[test]
fn many_pieces_go_in_one_call_and_name_the_one_that_fails() {
    let backend = open(HostOptions::default());
    let base = backend.reserve(4096 * G).unwrap();
    let handle = backend.create(4000 * G).unwrap();
    map(&backend, base, handle, 4000 * G).unwrap();
    let stamps: Vec<[u8; 8]> = (0..4000u64).map(u64::to_le_bytes).collect();
    let pieces: Vec<_> = stamps.iter().zip(0..).map(|(stamp, index)| (base + index * G, &stamp[..])).collect();
    backend.write_pieces(&pieces).unwrap();
    assert_eq!(backend.resident().unwrap(), 4000 * 4 * KIB, "one page a stamp");
    let mut seen = vec![[0; 8]; 4000];
    let mut wanted: Vec<_> =
        seen.iter_mut().zip(0..).map(|(stamp, index)| (base + index * G, &mut stamp[..])).collect();
    backend.read_pieces(&mut wanted).unwrap();
    assert_eq!(seen, stamps);

    let hole = base + 4000 * G;
    let error = backend.write_pieces(&[(base, &[1]), (base, &[]), (hole - 2, &[2, 3, 4]), (base, &[9])]).unwrap_err();
    assert_eq!(error.address, hole, "the first page that is not there");
    assert_eq!(bytes_at(&backend, base, 1), [1], "earlier pieces were written, later ones not");
}

#[test]
fn pieces_are_counted_as_the_kernel_counts_them() {
    let backend = open(HostOptions::default());
    let base = backend.reserve(256 * G).unwrap();
    let used = || backend.mapping_budget().0;
    let handles: Vec<_> = (0..64).map(|_| backend.create(G).unwrap()).collect();
    assert_eq!((used(), kernel_pieces(base, 256 * G)), (1, 1));
    for (index, handle) in (0..).zip(&handles) {
        map(&backend, base + (100 + index) * G, *handle, G).unwrap();
    }
    assert_eq!((used(), kernel_pieces(base, 256 * G)), (3, 3), "ascending offsets are one VMA");
    for (index, handle) in (0..).zip(&handles) {
        relocate(&backend, base + (100 + index) * G, base + (63 - index) * G, *handle, G).unwrap();
    }
    assert_eq!((used(), kernel_pieces(base, 256 * G)), (66, 66), "descending offsets are a VMA each");
    for index in (0..64).step_by(3) {
        unmap(&backend, base + index * G, G).unwrap();
    }
    assert_eq!(used(), kernel_pieces(base, 256 * G));
}

#[test]
fn random_edits_agree_with_the_kernel() {
    for backend in both_ways() {
        let (slots, mut seed) = (48u64, 11u64);
        let base = backend.reserve(slots * G).unwrap();
        let handles: Vec<_> = (0..16).map(|_| backend.create(G).unwrap()).collect();
        for (handle, index) in handles.iter().zip(0u8..) {
            map(&backend, base, *handle, G).unwrap();
            backend.write(base, &[index; 3]).unwrap();
            unmap(&backend, base, G).unwrap();
        }
        let mut place: Vec<Option<u64>> = vec![None; 16];
        for _ in 0..400 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (index, to) = ((seed >> 33) as usize % 16, base + (seed >> 40) % slots * G);
            let free = !place.contains(&Some(to));
            let done = match place[index] {
                None => map(&backend, to, handles[index], G),
                Some(from) if seed >> 62 == 0 => {
                    unmap(&backend, from, G).unwrap();
                    place[index] = None;
                    continue;
                }
                Some(from) => relocate(&backend, from, to, handles[index], G),
            };
            assert_eq!(done.is_ok(), free, "{done:?}");
            if free {
                place[index] = Some(to);
            }
        }
        assert_eq!(backend.mapping_budget().0, kernel_pieces(base, slots * G));
        for (index, at) in place.iter().enumerate().filter_map(|(index, at)| Some((index, (*at)?))) {
            assert_eq!(bytes_at(&backend, at, 3), [index as u8; 3]);
        }
    }
}

#[test]
fn the_budget_is_refused_with_a_type_before_the_kernel_refuses() {
    let backend = open(HostOptions { vma_budget: Some(40), ..HostOptions::default() });
    let base = backend.reserve(256 * G).unwrap();
    let mut mapped = Vec::new();
    let error = loop {
        let handle = backend.create(G).unwrap();
        let at = base + 2 * mapped.len() as u64 * G;
        match map(&backend, at, handle, G) {
            Ok(()) => mapped.push((at, handle)),
            Err(error) => break error,
        }
    };
    let (used, budget) = backend.mapping_budget();
    assert_eq!((error.call, error.mapping_limit), (DriverCall::Map, Some((used, budget))));
    assert!(error.to_string().contains("vm.max_map_count"), "{error}");
    assert_eq!((mapped.len(), used, budget), (19, 39, 40), "each costs a mapping and a hole");
    // A move that ends with no more pieces is allowed; so is unmapping.
    let (at, handle) = mapped[5];
    relocate(&backend, at, base + 100 * G, handle, G).unwrap();
    unmap(&backend, mapped[7].0, G).unwrap();
    assert!(backend.mapping_budget().0 < used);
    map(&backend, base + 102 * G, mapped[7].1, G).unwrap();

    let none = open(HostOptions { vma_budget: Some(0), ..HostOptions::default() });
    assert_eq!(none.reserve(G).unwrap_err().mapping_limit, Some((0, 0)));
}

#[test]
fn reservations_are_apart_and_aligned() {
    let backend = open(HostOptions::default());
    let bases: HashSet<_> = (0..20).map(|_| backend.reserve(1024 * GIB).unwrap()).collect();
    assert_eq!(bases.len(), 20);
    assert!(bases.iter().all(|base| base % G == 0));
    let error = backend.reserve(1 << 60).unwrap_err();
    assert_eq!((error.call, error.out_of_memory), (DriverCall::Reserve, false));
    // A handle does not reach from one reservation into the next, nor into the guard.
    let handle = backend.create(2 * G).unwrap();
    for base in bases {
        assert!(map(&backend, base + 1024 * GIB - G, handle, 2 * G).is_err());
        assert!(map(&backend, base - 2 * G, handle, 2 * G).is_err());
    }
}

#[test]
fn live_neighbours_do_not_notice_moves() {
    for backend in both_ways().map(Arc::new) {
        let base = backend.reserve(16 * G).unwrap();
        let [left, live, right] = [(); 3].map(|()| backend.create(G).unwrap());
        // Ascending offsets side by side: one VMA, which each move splits and joins again.
        for (place, handle) in (4..).zip([left, live, right]) {
            map(&backend, base + place * G, handle, G).unwrap();
            backend.write(base + place * G, &[place as u8]).unwrap();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            let words = std::ptr::with_exposed_provenance_mut::<u64>((base + 5 * G) as usize);
            for round in 1u64.. {
                for page in 0..512 {
                    // SAFETY: in the live mapping, which stays, and only this thread uses it.
                    let word = unsafe { words.add(page * 512) };
                    // SAFETY: as above.
                    unsafe { word.write_volatile(round) };
                    // SAFETY: as above.
                    assert_eq!(unsafe { word.read_volatile() }, round);
                }
                if stopped.load(SeqCst) {
                    break;
                }
            }
        };
        backend.launch(StreamId(0), work).unwrap();
        for _ in 0..500 {
            for (handle, home, away) in [(left, 4, 12), (right, 6, 10)] {
                relocate(&backend, base + home * G, base + away * G, handle, G).unwrap();
                relocate(&backend, base + away * G, base + home * G, handle, G).unwrap();
            }
        }
        stop.store(true, SeqCst);
        backend.quiesce().unwrap();
        assert_eq!((bytes_at(&backend, base + 4 * G, 1), bytes_at(&backend, base + 6 * G, 1)), (vec![4], vec![6]));
    }
}

/// Set in the child of `an_early_unmap_is_a_real_fault`.
const CHILD: &str = "XSEG_TEST_EARLY_UNMAP";

#[test]
fn an_early_unmap_is_a_real_fault() {
    if let Ok(early) = std::env::var(CHILD) {
        return use_memory_on_a_stream(early == "1");
    }
    let run = |early| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["an_early_unmap_is_a_real_fault", "--exact", "--test-threads=1"]).env(CHILD, early);
        command.output().unwrap().status
    };
    assert!(run("0").success());
    const SIGSEGV: i32 = 11;
    assert_eq!(run("1").signal(), Some(SIGSEGV));
}

fn use_memory_on_a_stream(early: bool) {
    let backend = Arc::new(open(HostOptions::default()));
    let base = backend.reserve(4 * G).unwrap();
    let handle = backend.create(G).unwrap();
    map(&backend, base, handle, G).unwrap();
    let (start, gate) = std::sync::mpsc::channel::<()>();
    let work = move || {
        gate.recv().unwrap();
        let pointer = std::ptr::with_exposed_provenance_mut::<u64>(base as usize);
        // SAFETY: none with `early`, which is what the test is about: the page must be gone.
        unsafe { pointer.write_volatile(42) };
    };
    backend.launch(StreamId(0), work).unwrap();
    if early {
        unmap(&backend, base, G).unwrap();
    }
    start.send(()).unwrap();
    backend.quiesce().unwrap();
    assert_eq!(bytes_at(&backend, base, 8), 42u64.to_le_bytes());
}
