//! Waits of one side for the other: where there is nothing to wait for, and who ends them.

use super::tests::{inode, memory, offer};
use super::*;
use rustix::net::SocketType;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn sockets_that_are_not_connected_are_named_so() {
    let file = memory();
    let folder = tempfile::tempdir().unwrap();
    for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
        let lone = || rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
        let listening = lone();
        let path = folder.path().join(format!("{kind:?}"));
        rustix::net::bind(&listening, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listening, 1).unwrap();
        for socket in [lone(), listening] {
            let sent = pass_on(socket.as_fd(), file.as_fd(), Patience::default()).unwrap_err();
            let received = take_over(socket.as_fd(), &mut Patience::default()).unwrap_err();
            for error in [sent, received] {
                assert!(matches!(&error, ShareFault::System(why) if why.contains("it is not connected")), "{error}");
            }
            let opened = Tie::open(socket, Patience::default()).unwrap_err();
            assert!(matches!(&opened, ShareFault::Malformed(why) if why.contains("not connected")), "{opened}");
        }
    }
}

#[test]
fn a_wait_ends_where_it_is_not_wanted_any_more() {
    let (here, there) = UnixStream::pair().unwrap();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let three_times = || {
        let asked = std::sync::Arc::clone(&asked);
        Patience::asking(Box::new(move || asked.fetch_add(1, Relaxed) % 3 < 2))
    };
    assert_eq!(take_over(there.as_fd(), &mut three_times()).unwrap_err(), ShareFault::Interrupted);
    assert_eq!(asked.load(Relaxed), 3);
    // A socket that is full.
    let file = memory();
    let error = (0..100_000).find_map(|_| pass_on(here.as_fd(), file.as_fd(), three_times()).err());
    assert_eq!((error, asked.load(Relaxed)), (Some(ShareFault::Interrupted), 6));
    // Handles that do not come.
    let (lease, export) = pair().unwrap();
    lease.offer(&offer(1000), &[]).unwrap();
    let (mut tie, _) = Tie::open(export, three_times()).unwrap();
    assert_eq!((tie.next().unwrap_err(), asked.load(Relaxed)), (ShareFault::Interrupted, 9));
    tie.done();
    // What is there is taken without a question.
    let (here, there) = UnixStream::pair().unwrap();
    pass_on(here.as_fd(), file.as_fd(), three_times()).unwrap();
    assert_eq!(inode(take_over(there.as_fd(), &mut three_times()).unwrap()), inode(&file));
    assert_eq!(asked.load(Relaxed), 9);
}
