//! Memory of one heap used through another, within a process: what is kept from whom for how long, what failures leave.
//! `share_processes.rs` has two processes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;
mod support;

use side::{Side, holds};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use support::{MS, S0, S1, S2, host, out_of_memory, sim};
use xseg::backend::fault::FaultyBackend;
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::error::{DriverCall, ShareFault};
use xseg::units::{GRANULE, KIB, MIB};
use xseg::{Allocation, Error, Heap};

#[test]
fn both_sides_see_one_memory() {
    let here = Side::new("handle_max:2MiB,growth:exact");
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let calls = Arc::new(FaultyBackend::new(device.clone()));
    let there = Side { heap: Heap::builder().backend(calls.clone()).build().unwrap(), device };
    // The block starts in the middle of a handle and ends in the middle of another.
    let before = here.heap.alloc(1536 * KIB, S0).unwrap();
    let block = here.heap.alloc(96 * MIB + 3 * KIB, S0).unwrap();
    let skip = block.address() % GRANULE;
    assert_ne!(skip, 0);
    here.stamp(block.address(), block.len(), 7);
    calls.clear_log();
    let imported = there.import_of(&here, &block);
    assert_eq!((imported.len(), imported.size()), (block.len(), block.size()));
    assert_eq!(imported.address() % GRANULE, skip, "as far into its first handle");
    let whole = (skip + block.size()).next_multiple_of(GRANULE);
    let reserved: Vec<_> = calls.log().into_iter().filter(|call| call.call == DriverCall::Reserve).collect();
    assert_eq!(reserved.iter().map(|call| call.bytes).collect::<Vec<_>>(), [whole], "exactly the handles");
    there.expect(imported.address(), imported.len(), 7);
    there.stamp(imported.address(), imported.len(), 1_000_000);
    here.expect(block.address(), block.len(), 1_000_000);
    let (ours, theirs) = (here.heap.stats(), there.heap.stats());
    assert_eq!((ours.exported, ours.imported, theirs.exported, theirs.imported), (block.size(), 0, 0, block.size()));
    assert_eq!((theirs.allocated, theirs.reserved), (0, 0), "it counts as no memory of this heap");
    assert!(ours.pinned >= block.size());
    imported.close().unwrap();
    here.heap.tick();
    assert_eq!((here.heap.stats().exported, here.heap.stats().pinned), (0, 0));
    assert_eq!(there.device.leaks().reservations, 1, "its heap's");
    here.expect(block.address(), block.len(), 1_000_000);
    here.heap.check().unwrap();
    drop((before, block));
}

/// The same device may import what it exported, and any number of imports see one memory.
#[test]
fn imports_of_one_block_end_one_by_one() {
    let here = Side::new("limit:64MiB,growth:exact,wait_limit:0s");
    let same = Side::on("", here.device.clone());
    let there = Side::new("");
    let block = here.heap.alloc(20 * MIB, S0).unwrap();
    let all = [same.import_of(&here, &block), there.import_of(&here, &block), there.import_of(&here, &block)];
    there.set_word(all[1].address() + 16 * MIB, 5);
    assert_eq!(there.word(all[2].address() + 16 * MIB), 5);
    assert_eq!(same.word(all[0].address() + 16 * MIB), 5);
    // An import is exported in its turn by nobody: it is no block.
    assert!(matches!(there.heap.export(all[1].address()), Err(Error::InvalidPointer { .. })));
    assert!(there.heap.free_raw(all[1].address()).is_err());
    drop(block);
    for (number, imported) in all.into_iter().enumerate() {
        assert_eq!((here.heap.stats().pending, here.heap.stats().exported), (20 * MIB, 20 * MIB), "{number} ended");
        imported.close().unwrap();
        here.heap.tick();
    }
    assert_eq!((here.heap.stats().pending, here.heap.stats().exported), (0, 0));
    here.heap.check().unwrap();
    drop(here.heap.alloc(64 * MIB, S0).unwrap());
}

/// A freed block is nobody's while an import is open: neither its addresses nor its handles.
#[test]
fn freed_memory_is_kept_until_the_import_has_ended() {
    let here = Side::new("limit:64MiB,handle_max:4MiB,growth:exact,wait_limit:0s");
    let there = Side::new("");
    let others: Vec<Allocation> = (0..4).map(|_| here.heap.alloc(8 * MIB, S0).unwrap()).collect();
    let block = here.heap.alloc(20 * MIB, S0).unwrap();
    let address = block.address();
    here.stamp(address, 20 * MIB, 3);
    let imported = there.import_of(&here, &block);
    drop(block);
    assert!(matches!(here.heap.export(address), Err(Error::InvalidPointer { .. })), "it is freed");
    // All that is left is taken, moved and trimmed; the exported handles stay.
    drop(others);
    for round in 0..4 {
        let taken = here.heap.alloc((44 - 4 * round) * MIB, S0).unwrap();
        here.stamp(taken.address(), taken.len(), 50 + round);
        let refused = out_of_memory(here.heap.alloc(24 * MIB, S0));
        assert_eq!((refused.exported, refused.waiting), (20 * MIB, 0));
        assert!(
            Error::OutOfMemory(Box::new(refused))
                .to_string()
                .contains("20.000 MiB of freed blocks are kept for exports")
        );
        drop(taken);
        here.heap.trim();
        assert_eq!(here.heap.set_limit(16 * MIB), 20 * MIB, "an export outlasts a lower limit");
        here.heap.set_limit(64 * MIB);
        there.expect(imported.address(), 20 * MIB, 3);
        here.heap.check().unwrap();
    }
    assert_eq!(here.heap.stats().reserved, 20 * MIB);
    imported.close().unwrap();
    // Nobody looks for it but the request itself.
    drop(here.heap.alloc(64 * MIB, S0).unwrap());
    assert_eq!(here.heap.stats().exported, 0);
}

/// The host waits for an import as for other work, when nothing else helps.
#[test]
fn a_request_waits_for_an_import() {
    let here = Side::new("limit:32MiB,growth:exact");
    let there = Side::new("");
    let block = here.heap.alloc(32 * MIB, S0).unwrap();
    let imported = there.import_of(&here, &block);
    drop(block);
    let later = std::thread::spawn(move || {
        std::thread::sleep(30 * MS);
        imported.close().unwrap();
        there
    });
    drop(here.heap.alloc(32 * MIB, S0).unwrap());
    assert_eq!(here.heap.stats().host_waits, 1);
    later.join().unwrap();
}

#[test]
fn the_block_outlives_its_imports() {
    let (here, there) = (Side::new("limit:64MiB"), Side::new(""));
    let block = here.heap.alloc(10 * MIB, S0).unwrap();
    for round in 0..3 {
        let imported = there.import_of(&here, &block);
        there.set_word(imported.address(), round);
        drop(imported);
        assert_eq!(here.word(block.address()), round);
    }
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 0);
    drop(block);
    here.heap.tick();
    assert_eq!((here.heap.stats().pending, here.heap.stats().allocated), (0, 0));
}

/// Work that was queued before the drop may use the import: it is unmapped, and the exporter told, afterwards.
#[test]
fn an_import_ends_when_its_work_has_passed() {
    let (here, there) = (host("limit:64MiB,growth:exact,wait_limit:0s"), host("wait_limit:0s"));
    let block = here.alloc(12 * MIB, S1);
    let import = || there.heap.import(here.heap.export(block.address()).unwrap()).unwrap();
    let imported = import();
    let (address, size) = (imported.address(), imported.size());
    there.work_at(S2, address, size, 5 * MS);
    drop(imported);
    there.heap.tick();
    there.heap.trim();
    here.heap.tick();
    assert_eq!((there.heap.stats().imported, here.heap.stats().exported), (size, size));
    there.work_at(S2, address, size, Duration::ZERO);
    assert!(matches!(there.heap.close_import(address), Err(Error::Share(ShareFault::NoImport { .. }))), "it has ended");
    there.time.advance(5 * MS);
    there.heap.tick();
    here.heap.tick();
    assert_eq!((there.heap.stats().imported, here.heap.stats().exported), (0, 0));
    // Waiting for it is bounded, and it ends by itself.
    let raw = import().into_raw();
    there.work_at(S2, raw, size, 5 * MS);
    assert_eq!(there.heap.close_import(raw), Err(ShareFault::InUse.into()));
    there.time.advance(5 * MS);
    there.heap.trim();
    assert_eq!(there.heap.stats().imported, 0);
    // While a graph is captured no epoch is closed.
    there.heap.begin_capture(xseg::PoolId(1, 1), xseg::StreamFilter::All).unwrap();
    let imported = import();
    assert_eq!(imported.close(), Err(ShareFault::InUse.into()));
    there.heap.end_capture(xseg::PoolId(1, 1)).unwrap();
    there.heap.release_capture(xseg::PoolId(1, 1)).unwrap();
    there.heap.tick();
    assert_eq!(there.heap.stats().imported, 0);
    drop(block);
    here.ends_with(0);
}

/// Where page tables may not be edited beside kernels, imports are mapped and unmapped on a quiet device.
#[test]
fn quiesced_devices_import_too() {
    let (here, there) = (host("limit:64MiB"), host("remap:quiesce"));
    let block = here.alloc(12 * MIB, S1);
    let imported = there.heap.import(here.heap.export(block.address()).unwrap()).unwrap();
    there.work_at(S2, imported.address(), imported.size(), 5 * MS);
    drop(imported);
    there.heap.tick();
    assert_ne!(there.heap.stats().imported, 0, "a drop waits for nothing");
    let imported = there.heap.import(here.heap.export(block.address()).unwrap()).unwrap();
    assert_eq!(there.heap.stats().imported, block.size(), "the next import did");
    imported.close().unwrap();
    assert_eq!(there.heap.stats().imported, 0);
    drop(block);
    here.ends_with(0);
}

#[test]
fn the_end_of_the_exporters_heap_leaves_the_importer_its_memory() {
    let here = Side::new("limit:64MiB,growth:exact");
    let there = Side::new("");
    let block = here.heap.alloc(12 * MIB, S0).unwrap();
    let ended = here.heap.alloc(4 * MIB, S0).unwrap();
    there.import_of(&here, &ended).close().unwrap();
    here.stamp(block.address(), block.len(), 11);
    let imported = there.import_of(&here, &block);
    here.heap.shut_down();
    assert!(matches!(here.heap.export(block.address()), Err(Error::ShutDown)));
    assert!(matches!(here.heap.export_handles(block.address()), Err(Error::ShutDown)));
    holds(&here.device, 0);
    // Another heap on the same device gets other memory.
    let next = Side::on("limit:64MiB,growth:exact", here.device.clone());
    let all = next.heap.alloc(64 * MIB, S0).unwrap();
    next.stamp(all.address(), all.len(), 0);
    there.expect(imported.address(), imported.len(), 11);
    there.set_word(imported.address(), 1);
    imported.close().unwrap();
    drop(block);
    holds(&there.device, 1);
}

#[test]
fn the_end_of_the_importers_heap_ends_its_imports() {
    let here = Side::new("limit:64MiB,growth:exact");
    let there = Side::new("");
    let block = here.heap.alloc(12 * MIB, S0).unwrap();
    let (imported, raw) = (there.import_of(&here, &block), there.import_of(&here, &block).into_raw());
    there.heap.shut_down();
    holds(&there.device, 0);
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 0);
    assert!(matches!(there.heap.close_import(raw), Err(Error::Share(ShareFault::NoImport { .. }))));
    drop(imported);
    assert!(matches!(there.heap.import(here.heap.export(block.address()).unwrap()), Err(Error::ShutDown)));
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 0);
}

#[test]
fn what_cannot_be_shared_is_said() {
    let (lab, here) = (sim("limit:64MiB"), Side::new("limit:64MiB"));
    let block = lab.alloc(MIB, S1);
    let error = lab.heap.export(block.address()).unwrap_err();
    assert_eq!(error, ShareFault::NoMemory { backend: "sim" }.into());
    assert!(error.to_string().contains("the sim backend has no memory to share; use `backend:host`"), "{error}");
    let real = here.heap.alloc(MIB, S1).unwrap();
    let exported = here.heap.export(real.address()).unwrap();
    assert_eq!(lab.heap.import(exported).unwrap_err(), ShareFault::NoMemory { backend: "sim" }.into());
    for address in [0, real.address() + 512, u64::MAX] {
        assert!(matches!(here.heap.export(address), Err(Error::InvalidPointer { .. })));
        assert_eq!(here.heap.close_import(address), Err(ShareFault::NoImport { address }.into()));
    }
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(matches!(here.heap.import(file), Err(Error::Share(ShareFault::Malformed(_)))));
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert_eq!(here.heap.import(ours).unwrap_err(), ShareFault::Used.into(), "nothing waits in it");
    assert_eq!(here.heap.receive(&theirs).unwrap_err(), ShareFault::Ended.into());
    let exported = here.heap.export(real.address()).unwrap();
    let again = exported.as_fd().try_clone_to_owned().unwrap();
    let there = Side::new("");
    let imported = there.heap.import(exported).unwrap();
    assert_eq!(there.heap.import(again).unwrap_err(), ShareFault::Used.into());
    imported.close().unwrap();
    drop(block);
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 0);
}

/// The exporter's heap ends while its handles are handed over: the importer has all of them, or hears that the other side ended.
#[test]
fn the_end_of_the_exporters_heap_during_an_import() {
    for round in 0..40 {
        let (here, there) = (Side::new("limit:1GiB,handle_max:2MiB,growth:exact"), Side::new(""));
        let block = here.heap.alloc(700 * MIB, S0).unwrap();
        here.stamp(block.address(), block.len(), round);
        let export = here.heap.export(block.address()).unwrap();
        let heap = there.heap.clone();
        let importer = std::thread::spawn(move || heap.import(export));
        std::thread::sleep(Duration::from_micros(round * 100));
        here.heap.shut_down();
        match importer.join().unwrap() {
            Ok(imported) => there.expect(imported.address(), imported.len(), round),
            Err(Error::Share(ShareFault::Ended)) => {}
            Err(error) => panic!("round {round}: {error}"),
        }
        holds(&here.device, 0);
        there.heap.tick();
        holds(&there.device, 1);
    }
}

#[test]
fn an_export_of_a_backend_that_nobody_knows_is_said_to_be() {
    let mut header = b"xsegmem\n".to_vec();
    for number in [1_u32, 9, 1, 0] {
        header.extend(number.to_le_bytes());
    }
    header.extend([0; 16]);
    for number in [2 * MIB, 0, 512, 512] {
        header.extend(number.to_le_bytes());
    }
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::io::Write::write_all(&mut ours, &header).unwrap();
    let error = Side::new("").heap.import(OwnedFd::from(theirs)).unwrap_err().to_string();
    assert!(error.contains("exported from the unknown backend and this heap is on host"), "{error}");
}

/// The pins of an export are its own, also where the client pins and unpins the same range.
#[test]
fn a_client_cannot_unpin_what_is_exported() {
    let (here, there) = (Side::new("limit:64MiB"), Side::new(""));
    let block = here.heap.alloc(4 * MIB, S0).unwrap();
    let at = block.address();
    let imports = [there.import_of(&here, &block), there.import_of(&here, &block)];
    assert!(matches!(here.heap.unpin(at, 4 * MIB), Err(Error::InvalidArgument(_))), "the client pinned nothing");
    here.heap.check().unwrap();
    here.heap.pin(at, 4 * MIB).unwrap();
    here.heap.unpin(at, 4 * MIB).unwrap();
    assert!(here.heap.unpin(at, 4 * MIB).is_err());
    here.heap.pin(at, 4 * MIB).unwrap();
    here.heap.check().unwrap();
    drop((block, imports));
    there.heap.tick();
    here.heap.tick();
    assert_eq!((here.heap.stats().exported, here.heap.stats().pinned), (0, 4 * MIB));
    here.heap.unpin(at, 4 * MIB).unwrap();
    assert!(here.heap.unpin(at, 4 * MIB).is_err());
    here.heap.check().unwrap();
}

/// Exports, imports, frees and pressure on several threads at once.
#[test]
fn threads_share_at_the_same_time() {
    let (here, there) = (Side::new("limit:256MiB,handle_max:4MiB"), Side::new(""));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (here, there) = (&here, &there);
            scope.spawn(move || {
                for round in 0..40_u64 {
                    let block = here.heap.alloc((1 + (thread * 7 + round * 5) % 23) * MIB, S0).unwrap();
                    let seed = thread * 1000 + round;
                    here.stamp(block.address(), block.len(), seed);
                    let imported = there.import_of(here, &block);
                    let len = block.len();
                    if round % 2 == 0 {
                        drop(block);
                        drop(here.heap.alloc(13 * MIB, S0).unwrap());
                    }
                    there.expect(imported.address(), len, seed);
                    match round % 3 {
                        0 => drop(imported),
                        _ => imported.close().unwrap(),
                    }
                }
            });
        }
    });
    there.heap.tick();
    here.heap.tick();
    let stats = here.heap.stats();
    assert_eq!((stats.exported, stats.allocated, stats.pending, there.heap.stats().imported), (0, 0, 0, 0));
    here.heap.check().unwrap();
    there.heap.check().unwrap();
}

/// A block of the run below: where it is, what is in it, and whether its owner has freed it.
struct Known {
    block: Option<Allocation>,
    len: u64,
    seed: u64,
    imports: Vec<(usize, xseg::Imported)>,
}

/// Blocks come and go under a limit, are exported to three heaps, freed before and after their imports end, trimmed and
/// moved; at every step each import shows what was written last.
#[test]
fn nothing_that_is_imported_is_ever_anothers() {
    let here = Side::new("limit:96MiB,handle_max:4MiB,growth:exact,wait_limit:0s");
    let sides = [Side::new(""), Side::on("", here.device.clone()), Side::new("handle_max:2MiB")];
    let mut random = support::Random(0x5eed);
    let mut known: Vec<Known> = Vec::new();
    let (mut imported, mut refused, mut freed_first) = (0, 0, 0);
    for step in 0..1500 {
        match random.below(10) {
            0..4 => match here.heap.alloc((1 + random.below(24)) * MIB + random.below(3) * 512, S1) {
                Ok(block) => {
                    let (seed, len) = (random.next() >> 8, block.len());
                    here.stamp(block.address(), len, seed);
                    known.push(Known { block: Some(block), len, seed, imports: Vec::new() });
                }
                Err(Error::OutOfMemory(_)) => {
                    refused += 1;
                    if let Some(one) = known.first_mut() {
                        one.block = None;
                    }
                }
                Err(error) => panic!("{error}"),
            },
            4..6 if !known.is_empty() => {
                let at = random.below(known.len() as u64) as usize;
                if let Some(block) = &known[at].block {
                    let to = random.below(3) as usize;
                    let import = sides[to].import_of(&here, block);
                    known[at].imports.push((to, import));
                    imported += 1;
                }
            }
            6..8 if !known.is_empty() => {
                let at = random.below(known.len() as u64) as usize;
                freed_first += usize::from(known[at].block.take().is_some() && !known[at].imports.is_empty());
            }
            8 if !known.is_empty() => {
                let at = random.below(known.len() as u64) as usize;
                if let Some((_, import)) = known[at].imports.pop() {
                    if step % 2 == 0 { import.close().unwrap() } else { drop(import) }
                }
            }
            9 => {
                here.heap.trim();
            }
            _ => {}
        }
        // Whoever writes, all see it.
        if let Some(one) = known.iter_mut().find(|one| !one.imports.is_empty() && step % 7 == 0) {
            one.seed = random.next() >> 8;
            let (to, import) = &one.imports[0];
            sides[*to].stamp(import.address(), import.len(), one.seed);
        }
        known.retain(|one| one.block.is_some() || !one.imports.is_empty());
        for one in known.iter().filter(|one| step % 10 == 0 || one.block.is_none()) {
            for (to, import) in &one.imports {
                sides[*to].expect(import.address(), one.len, one.seed);
            }
            if let Some(block) = &one.block {
                here.expect(block.address(), one.len, one.seed);
            }
        }
        here.heap.check().unwrap();
    }
    assert!(imported > 100 && refused > 20 && freed_first > 40, "{imported}, {refused}, {freed_first}");
    drop(known);
    for side in sides.iter().chain([&here]) {
        side.heap.tick();
        side.heap.trim();
        side.heap.check().unwrap();
    }
    let stats = here.heap.stats();
    assert_eq!((stats.exported, stats.pending, stats.pinned, stats.reserved), (0, 0, 0, 0));
    drop(sides);
}

/// Other threads see epochs pass and give imports back meanwhile: no close of an idle import says that it is in use.
#[test]
fn threads_close_at_the_same_time() {
    let (here, there) = (Side::new("limit:64MiB,handle_max:2MiB"), Side::new(""));
    let block = here.heap.alloc(24 * MIB, S0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for round in 0..1000 {
                    let imported = there.import_of(&here, &block);
                    match round % 2 {
                        0 => drop(imported),
                        _ => imported.close().unwrap_or_else(|error| panic!("round {round}: {error}")),
                    }
                }
            });
        }
    });
    there.heap.tick();
    assert_eq!(there.heap.stats().imported, 0);
}
