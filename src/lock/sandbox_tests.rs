//! The lock where the operating system has no barrier for it, or takes it away: each in a process of its own.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use super::*;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule};
use std::process::Command;
use std::sync::mpsc::channel;

/// Set in the child to what it is to do.
const CHILD: &str = "XSEG_TEST_SANDBOX";

/// From now on the system refuses the barrier to every thread of the process.
fn forbid_the_barrier() {
    let action = SeccompAction::Errno(libc::EPERM as u32);
    let rules = [(libc::SYS_membarrier, Vec::<SeccompRule>::new())].into();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, std::env::consts::ARCH.try_into().unwrap());
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter_all_threads(&program).unwrap();
}

fn own(lock: &Lock<u32>) -> u32 {
    let times = STREAK_MOST + 1;
    (0..times).for_each(|_| *lock.lock() += 1);
    times
}

fn owns(lock: &Lock<u32>) -> bool {
    lock.enter_as_owner(seat::mine()).is_some()
}

/// It counts right, and nobody owns it.
fn is_plain(lock: &Lock<u32>) {
    *lock.lock() = 0;
    let times: u32 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| (own(lock), owns(lock)))).collect();
        let done = threads.into_iter().map(|thread| thread.join().unwrap());
        done.map(|(times, owns)| if owns { panic!("no owner without a barrier") } else { times }).sum()
    });
    assert_eq!(*lock.lock(), times);
    let alone = own(lock);
    assert!(!owns(lock));
    assert_eq!(*lock.try_lock().unwrap(), times + alone);
}

fn forbidden_from_the_start() {
    forbid_the_barrier();
    assert!(!seat::barriers_work());
    is_plain(&Lock::new(0));
}

fn forbidden_while_a_thread_owns_locks() {
    if !seat::barriers_work() {
        return;
    }
    let locks = [Lock::new(0), Lock::new(0), Lock::new(0)];
    let (enter, entered) = channel();
    let (leave, left) = channel();
    std::thread::scope(|scope| {
        let locks = &locks;
        scope.spawn(move || {
            locks.iter().for_each(|lock| assert_eq!((own(lock), owns(lock)), (STREAK_MOST + 1, true)));
            let held = locks[1].enter_as_owner(seat::mine()).unwrap();
            enter.send(()).unwrap();
            left.recv().unwrap();
            drop(held);
            assert!(owns(&locks[1]), "nobody took it");
            enter.send(()).unwrap();
            left.recv().unwrap();
        });
        entered.recv().unwrap();
        forbid_the_barrier();
        assert_eq!(*locks[0].lock(), STREAK_MOST + 1);
        assert!(locks[1].try_lock().is_none(), "its owner is inside");
        assert!(!seat::barriers_work(), "it was refused");
        leave.send(()).unwrap();
        entered.recv().unwrap();
        assert_eq!(locks[1].try_lock().map(|value| *value), Some(STREAK_MOST + 1));
        assert_eq!(*locks[2].lock(), STREAK_MOST + 1, "the owner lives and is outside");
        leave.send(()).unwrap();
    });
    locks.iter().for_each(is_plain);
}

#[test]
fn without_the_barrier_the_lock_is_a_plain_one() {
    match std::env::var(CHILD).as_deref() {
        Ok("start") => return forbidden_from_the_start(),
        Ok(_) => return forbidden_while_a_thread_owns_locks(),
        Err(_) => {}
    }
    for when in ["start", "later"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::without_the_barrier_the_lock_is_a_plain_one");
        child.args([name.split_once("::").unwrap().1, "--exact", "--test-threads=1"]).env(CHILD, when);
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{when}: {text}");
    }
}
