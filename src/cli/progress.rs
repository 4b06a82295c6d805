//! A bar on long work, on a terminal only.
#![forbid(unsafe_code)]

use crate::suite;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// What is going on, on stderr; gone when dropped.
#[derive(Debug)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Nothing is shown unless stderr is a terminal.
    pub(super) fn new() -> Self {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        Self(ProgressBar::with_draw_target(None, target))
    }

    /// Work of unknown length.
    pub(super) fn spin(&self, what: String) {
        self.0.set_style(ProgressStyle::default_spinner());
        self.0.unset_length();
        self.0.set_message(what);
        self.0.enable_steady_tick(Duration::from_millis(120));
    }

    /// Work of `length` steps.
    pub(super) fn bar(&self, what: String, length: u64) {
        // The template is fixed; a bad one would leave the style as it is.
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} %, {elapsed} gone, {eta} left") {
            self.0.set_style(style);
        }
        self.0.set_length(length);
        self.0.set_position(0);
        self.0.reset_eta();
        self.0.reset_elapsed();
        self.0.enable_steady_tick(Duration::from_millis(250));
        self.0.set_message(what);
    }

    pub(super) fn at(&self, step: u64) {
        self.0.set_position(step);
    }

    /// Takes the bar off the screen while `print` writes to it.
    pub(super) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.suspend(print)
    }
}

/// Progress of a whole suite, with the time that is left. Any thread may tell it.
#[derive(Debug)]
pub(super) struct Bar(Progress);

impl Bar {
    pub(super) fn new() -> Self {
        Self(Progress::new())
    }

    /// Work of unknown length.
    pub(super) fn spin(&self, what: &str) {
        self.0.spin(what.to_owned());
    }

    /// See [`Progress::aside`].
    pub(super) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.aside(print)
    }
}

impl suite::Progress for Bar {
    fn length(&self, work: u64) {
        self.0.bar(String::new(), work);
    }

    fn done(&self, work: u64) {
        self.0.0.inc(work);
    }

    fn doing(&self, what: &str) {
        self.0.0.set_message(what.to_owned());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
