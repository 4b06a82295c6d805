//! What tests of heaps on the stand-in driver share.
#![allow(dead_code, reason = "not every test binary needs all")]

use super::control::Control;
use xseg::Heap;

/// A heap with these settings.
pub(crate) fn heap(conf: &str) -> Heap {
    Heap::builder().conf(conf).unwrap().build().unwrap()
}

/// Everything that the stand-in counts, without streams of the tests' own.
pub(crate) fn all(driver: &Control) -> [u64; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(|what| driver.count(what))
}
