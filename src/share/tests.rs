//! Both sides of the messages, and what a hostile peer sends.

use super::message::{LONGEST, Said, encode_pieces, encode_refusal};
use super::socket::{self, MARK};
use super::*;
use crate::units::GRANULE;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;

pub(super) fn offer(handles: u32) -> Offer {
    let mapped = u64::from(handles) * GRANULE;
    Offer { backend: 2, device: [7; 16], handles, mapped, offset: 512, size: mapped - 1024, len: mapped - 2000 }
}

/// A file of its own, so that it is known again by its inode.
pub(super) fn memory() -> OwnedFd {
    memfd_create("test", MemfdFlags::CLOEXEC).unwrap()
}

fn pieces(count: usize) -> Vec<(Piece, OwnedFd)> {
    (0..count).map(|at| (Piece { start: at as u64 * GRANULE, bytes: GRANULE }, memory())).collect()
}

pub(super) fn inode(fd: impl AsFd) -> u64 {
    fstat(fd).unwrap().st_ino
}

fn opened() -> (Lease, Tie, Offer) {
    let (lease, export) = pair().unwrap();
    assert!(lease.offer(&offer(2), &[]).unwrap());
    let (tie, offer) = Tie::open(export, Patience::default()).unwrap();
    (lease, tie, offer)
}

#[test]
fn what_is_offered_arrives() {
    let (lease, export) = pair().unwrap();
    let sent = pieces(BATCH);
    assert!(lease.offer(&offer(64), &sent).unwrap());
    let (mut tie, found) = Tie::open(export, Patience::default()).unwrap();
    assert_eq!(found, offer(64));
    let came = tie.next().unwrap();
    assert_eq!(came.len(), BATCH);
    for ((piece, descriptor), (was, original)) in came.iter().zip(&sent) {
        assert_eq!((piece, inode(descriptor)), (was, inode(original)));
        let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "another program would get it");
    }
}

#[test]
fn an_import_is_over_when_it_is_done() {
    let (lease, tie, _) = opened();
    assert!(!lease.is_over(NOW));
    tie.hello().unwrap();
    assert!(!lease.is_over(NOW));
    // As in a forked child: a copy of the descriptor stays open.
    let copy = tie.try_clone();
    tie.done();
    assert!(lease.is_over(NOW) && lease.is_over(NOW));
    drop(copy);
}

#[test]
fn an_import_that_never_began_is_over_with_its_descriptor() {
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(1), &pieces(1)).unwrap();
    assert!(!lease.is_over(NOW));
    drop(export);
    assert!(lease.is_over(NOW));
    let (lease, tie, _) = opened();
    drop(tie);
    assert!(lease.is_over(NOW));
}

#[test]
fn an_import_without_an_end_lasts_as_long_as_its_process() {
    let (lease, tie, _) = opened();
    tie.hello().unwrap();
    drop(tie);
    // Hung up, but this process lives and may have it mapped.
    assert!(!lease.is_over(NOW) && !lease.is_over(Duration::from_millis(1)));
}

#[test]
fn a_server_hands_over_what_is_asked_for() {
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(3), &pieces(1)).unwrap();
    let server = lease.server();
    let serving = std::thread::spawn(move || {
        let mut asked = 0;
        while server.is_asked() {
            asked += 1;
            if asked > 2 {
                server.refuse("no more today");
            } else {
                server.queue(&pieces(1)).unwrap();
            }
        }
        asked
    });
    let (mut tie, _) = Tie::open(export, Patience::default()).unwrap();
    tie.hello().unwrap();
    for _ in 0..3 {
        assert_eq!(tie.next().unwrap().len(), 1);
        assert!(!lease.is_over(NOW));
    }
    assert_eq!(tie.next().unwrap_err(), ShareFault::Refused("no more today".into()));
    tie.done();
    assert_eq!(serving.join().unwrap(), 3);
    assert!(lease.is_over(NOW), "what the server heard counts");
}

#[test]
fn a_server_ends_when_the_exporter_hangs_up() {
    let (lease, tie, _) = opened();
    let server = lease.server();
    let serving = std::thread::spawn(move || server.is_asked());
    lease.hang_up();
    assert!(!serving.join().unwrap());
    drop(tie);
}

#[test]
fn a_server_ends_when_the_importer_closes_its_half() {
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(2), &[]).unwrap();
    let (server, (ended, end)) = (lease.server(), std::sync::mpsc::channel());
    let serving = std::thread::spawn(move || ended.send(server.is_asked()));
    rustix::net::shutdown(&export, rustix::net::Shutdown::Write).unwrap();
    assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(false));
    serving.join().unwrap().unwrap();
    // It may map what was queued for it, as long as it has the other half.
    assert!(!lease.is_over(NOW));
    drop(export);
    assert!(lease.is_over(NOW));
}

#[test]
fn an_export_serves_one_import() {
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(1), &[]).unwrap();
    let again = export.try_clone().unwrap();
    let (_tie, _) = Tie::open(export, Patience::default()).unwrap();
    assert_eq!(Tie::open(again, Patience::default()).unwrap_err(), ShareFault::Used);
    let (lease, export) = pair().unwrap();
    drop(lease);
    assert_eq!(Tie::open(export, Patience::default()).unwrap_err(), ShareFault::Ended);
}

/// Opens an export whose first message is `bytes` with `descriptors`.
fn opened_with(bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<Offer, ShareFault> {
    let (ours, theirs) = socket::pair().unwrap();
    socket::send(ours.as_fd(), bytes, descriptors).unwrap();
    Tie::open(theirs, Patience::default()).map(|(_, offer)| offer)
}

#[test]
fn headers_are_checked() {
    let good = offer(2).encode(&[]);
    assert_eq!(opened_with(&good, &[]), Ok(offer(2)));
    let file = memory();
    let piece = Piece { start: 0, bytes: GRANULE };
    for count in 0..4 {
        let with = offer(2).encode(&vec![piece; count]);
        for descriptors in 0..4 {
            let opened = opened_with(&with, &vec![file.as_fd(); descriptors]);
            assert_eq!(opened.is_ok(), descriptors == count && count <= 2, "{count} with {descriptors}: {opened:?}");
        }
    }
    let malformed = |result: Result<Offer, ShareFault>| matches!(result, Err(ShareFault::Malformed(_)));
    for length in 1..good.len() {
        assert!(malformed(opened_with(&good[..length], &[])), "{length}");
    }
    assert!(malformed(opened_with(&[&good[..], &[0]].concat(), &[])));
    assert!(malformed(opened_with(&[9; LONGEST + 1], &[])));
    let mut other = good.clone();
    other[20] = 1;
    assert!(malformed(opened_with(&other, &[])), "a handle that is not there");
    let mut other = good.clone();
    other[8] = 2;
    assert_eq!(opened_with(&other, &[]), Err(ShareFault::OtherVersion { theirs: 2, ours: 1 }));
    let base = offer(2);
    for wrong in [
        Offer { handles: 0, ..base },
        Offer { handles: 3, ..base },
        Offer { handles: u32::MAX, mapped: u64::MAX / GRANULE * GRANULE, ..base },
        Offer { mapped: 0, ..base },
        Offer { mapped: 4 * GRANULE + 1, ..base },
        Offer { mapped: 1 << 62, ..base },
        Offer { offset: u64::MAX, ..base },
        Offer { offset: 4096, ..base },
        Offer { size: u64::MAX, ..base },
        Offer { size: 0, len: 0, ..base },
        Offer { len: base.size + 1, ..base },
    ] {
        assert!(malformed(opened_with(&wrong.encode(&[]), &[])), "{wrong:?}");
    }
    assert_eq!(opened_with(&Offer { len: 0, ..base }.encode(&[]), &[]), Ok(Offer { len: 0, ..base }));
}

#[test]
fn handles_are_checked_and_their_descriptors_closed() {
    let two = [memory(), memory()];
    let [first, second] = [two[0].as_fd(), two[1].as_fd()];
    let piece = Piece { start: 0, bytes: GRANULE };
    let good = encode_pieces(&[piece]);
    let many = vec![first; BATCH + 8];
    let cases: [(Vec<u8>, &[BorrowedFd<'_>]); 12] = [
        (good.clone(), &[]),
        (good.clone(), &[first, second]),
        (encode_pieces(&[piece, piece]), &[first]),
        (encode_pieces(&[]), &[]),
        (encode_pieces(&[]), &[first]),
        (good[..16].to_vec(), &[first]),
        ([&good[..], &[1]].concat(), &[first]),
        (encode_pieces(&[Piece { start: 1, ..piece }]), &[first]),
        (encode_pieces(&[Piece { bytes: 0, ..piece }]), &[first]),
        (encode_pieces(&[Piece { bytes: GRANULE + 4096, ..piece }]), &[first]),
        (Said::Done.encode().to_vec(), &[first]),
        (vec![0; LONGEST + 1], &[first]),
    ];
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let held = |of: u64| open().filter(|entry| std::fs::metadata(entry.path()).is_ok_and(|m| ino(&m) == of)).count();
    for (bytes, descriptors) in &cases {
        let (ours, theirs) = socket::pair().unwrap();
        socket::send(ours.as_fd(), &offer(2).encode(&[]), &[]).unwrap();
        let (mut tie, _) = Tie::open(theirs, Patience::default()).unwrap();
        socket::send(ours.as_fd(), bytes, descriptors).unwrap();
        let error = tie.next().unwrap_err();
        assert!(matches!(error, ShareFault::Malformed(_)), "{bytes:?}: {error}");
    }
    // More descriptors than any message may carry are cut off by the system.
    let (ours, theirs) = socket::pair().unwrap();
    socket::send(ours.as_fd(), &offer(2).encode(&[]), &[]).unwrap();
    let (mut tie, _) = Tie::open(theirs, Patience::default()).unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH + 8))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&many)));
    let bytes = [rustix::io::IoSlice::new(&good)];
    rustix::net::sendmsg(ours.as_fd(), &bytes, &mut control, rustix::net::SendFlags::empty()).unwrap();
    assert!(matches!(tie.next(), Err(ShareFault::Malformed(_))));
    for file in &two {
        assert_eq!(held(inode(file)), 1, "only the test's own is left");
    }
}

fn ino(metadata: &std::fs::Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    metadata.ino()
}

#[test]
fn what_an_importer_says_is_checked() {
    let (ours, theirs) = socket::pair().unwrap();
    let lease = Lease::new(ours);
    let file = memory();
    for bytes in [&[0][..], &[200; 3], &[1; 100], &encode_refusal("x"), &Said::Hello.encode(), &Said::Hello.encode()] {
        socket::send(theirs.as_fd(), bytes, &[file.as_fd()]).unwrap();
    }
    assert!(!lease.is_over(NOW));
    drop(theirs);
    // A file is always readable: a process that is gone, as far as anyone can see.
    assert!(lease.is_over(NOW));
}

#[test]
fn an_export_travels_over_a_stream() {
    let (here, there) = UnixStream::pair().unwrap();
    let file = memory();
    pass_on(here.as_fd(), file.as_fd(), Patience::default()).unwrap();
    assert_eq!(inode(take_over(there.as_fd(), &mut Patience::default()).unwrap()), inode(&file));
    // In two halves, the descriptor with the first.
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let rights = [file.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&rights)));
    let bytes = [rustix::io::IoSlice::new(&MARK[..3])];
    rustix::net::sendmsg(&here, &bytes, &mut control, rustix::net::SendFlags::empty()).unwrap();
    std::io::Write::write_all(&mut &here, &MARK[3..]).unwrap();
    assert_eq!(inode(take_over(there.as_fd(), &mut Patience::default()).unwrap()), inode(&file));
    std::io::Write::write_all(&mut &here, &MARK).unwrap();
    assert!(
        matches!(take_over(there.as_fd(), &mut Patience::default()), Err(ShareFault::Malformed(_))),
        "no descriptor"
    );
    socket::send(here.as_fd(), &MARK, &[file.as_fd(), file.as_fd()]).unwrap();
    assert!(
        matches!(take_over(there.as_fd(), &mut Patience::default()), Err(ShareFault::Malformed(_))),
        "two descriptors"
    );
    std::io::Write::write_all(&mut &here, b"hello").unwrap();
    assert!(matches!(take_over(there.as_fd(), &mut Patience::default()), Err(ShareFault::Malformed(_))));
    drop(here);
    assert_eq!(take_over(there.as_fd(), &mut Patience::default()).unwrap_err(), ShareFault::Ended);
    assert_eq!(pass_on(there.as_fd(), file.as_fd(), Patience::default()).unwrap_err(), ShareFault::Ended);
    assert!(matches!(take_over(file.as_fd(), &mut Patience::default()), Err(ShareFault::System(_))));
}

#[test]
fn all_waits_of_an_import_have_one_end() {
    const ALL: Duration = Duration::from_millis(300);
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(1000), &[]).unwrap();
    let server = lease.server();
    let serving = std::thread::spawn(move || {
        // Slow, but never as slow as that.
        while server.is_asked() {
            std::thread::sleep(ALL / 5);
            if server.queue(&pieces(1)).is_err() {
                break;
            }
        }
    });
    let (mut tie, _) = Tie::open(export, Patience::new(ALL)).unwrap();
    tie.hello().unwrap();
    let error = (0..1000).find_map(|_| tie.next().err());
    assert_eq!(error, Some(ShareFault::Silent(ALL)));
    tie.done();
    serving.join().unwrap();
}

#[test]
fn what_was_waited_for_an_export_is_not_waited_again_for_its_handles() {
    const ALL: Duration = Duration::from_millis(20);
    let (_here, there) = UnixStream::pair().unwrap();
    let mut patience = Patience::new(ALL);
    assert_eq!(take_over(there.as_fd(), &mut patience).unwrap_err(), ShareFault::Silent(ALL));
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(1000), &[]).unwrap();
    let (mut tie, _) = Tie::open(export, patience).unwrap();
    // Nobody serves it; with a patience of its own it would name another time.
    assert_eq!(tie.next().unwrap_err(), ShareFault::Silent(ALL));
}

/// Runs a test of this file in a process of its own, which may set limits.
fn alone(name: &str, test: impl FnOnce()) {
    const MARK: &str = "XSEG_SHARE_ALONE";
    if std::env::var_os(MARK).is_some() {
        return test();
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("share::tests::{name}"), "--nocapture", "--test-threads=1"]);
    let output = command.env(MARK, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// All descriptors that this process may still open.
fn all_descriptors() -> Vec<OwnedFd> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: Some(64) }).unwrap();
    let first = std::fs::File::open("/dev/null").map(OwnedFd::from).ok();
    let all = std::iter::successors(first, |one| one.try_clone().ok());
    all.collect()
}

#[test]
fn an_import_is_not_over_where_nothing_can_be_asked() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    alone("an_import_is_not_over_where_nothing_can_be_asked", || {
        let (lease, tie, _) = opened();
        tie.hello().unwrap();
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
        assert_eq!(hung_up([&lease].into_iter()), [true], "to be asked by itself");
        assert!(!lease.is_over(NOW));
        setrlimit(Resource::Nofile, before).unwrap();
        assert_eq!(hung_up([&lease].into_iter()), [false]);
        tie.done();
        assert_eq!(hung_up([&lease].into_iter()), [true]);
        assert!(lease.is_over(NOW));
    });
}

#[test]
fn a_pidfd_that_finds_no_room_is_not_lost() {
    alone("a_pidfd_that_finds_no_room_is_not_lost", || {
        let (lease, tie, _) = opened();
        tie.hello().unwrap();
        let server = lease.server();
        let mut taken = all_descriptors();
        assert!(!server.is_asked());
        drop(tie);
        taken.extend(all_descriptors());
        // Hung up without an end, by a process that cannot be looked for.
        assert!(!lease.is_over(NOW) && !lease.is_over(NOW));
        drop(taken);
        // It is there still: this process, which lives.
        assert!(!lease.is_over(NOW));
    });
}

#[test]
fn an_importer_hears_that_its_exporter_has_no_descriptor_left() {
    alone("an_importer_hears_that_its_exporter_has_no_descriptor_left", || {
        let (lease, mut tie, _) = opened();
        tie.hello().unwrap();
        let taken = all_descriptors();
        assert!(!lease.server().is_asked());
        match tie.next().unwrap_err() {
            ShareFault::Refused(why) => assert!(why.contains("ulimit -n"), "{why}"),
            other => panic!("{other}"),
        }
        drop(taken);
        tie.done();
        assert!(lease.is_over(NOW));
    });
}

#[test]
fn an_importer_without_descriptors_says_so() {
    alone("an_importer_without_descriptors_says_so", || {
        let limited = |error: ShareFault| match error {
            ShareFault::NoDescriptor(why) => why,
            other => panic!("{other}"),
        };
        // Those of the offer.
        let (lease, export) = pair().unwrap();
        lease.offer(&offer(2), &pieces(2)).unwrap();
        let mut taken = all_descriptors();
        assert!(limited(Tie::open(export, Patience::default()).unwrap_err()).contains("did not all arrive"));
        assert!(lease.is_over(NOW));
        drop(taken);
        // Its own pidfd, and those of a later message.
        let (lease, mut tie, _) = opened();
        let sent = pieces(2);
        lease.server().queue(&sent).unwrap();
        taken = all_descriptors();
        assert!(limited(tie.hello().unwrap_err()).contains("which process this is"));
        taken.pop();
        tie.hello().unwrap();
        assert!(limited(tie.next().unwrap_err()).contains("did not all arrive"));
        // The one that did arrive is closed again, and at the limit no export is made either.
        let more = all_descriptors();
        assert_eq!(more.len(), 1);
        assert!(limited(pair().unwrap_err()).contains("no pair of sockets"));
    });
}
