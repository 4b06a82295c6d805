//! `XSEG_CONF`: text to [`Config`] and back.
//!
//! The form is `key:value,key:value`. One table, [`KEYS`], drives the parser, its errors, `xseg conf` and
//! the README. Nothing is ever ignored: an unknown key, a value out of range and a contradiction are
//! errors that name the key and say what is allowed. Blank entries are no error, so that
//! `XSEG_CONF="$XSEG_CONF,limit:4G"` works with nothing set before.
#![forbid(unsafe_code)]

mod keys;
mod values;

pub use keys::{KEYS, Key, markdown_table};
use values::size_text;
#[cfg(feature = "cli")]
pub(crate) use values::{Ratio, duration, size};

use crate::config::{BackendChoice, Config, Peers, SMALL_LIMIT_MAX, SizeOrShare};
use crate::error::{Error, Result};
use std::fmt;

/// Name of the environment variable.
pub const VARIABLE: &str = "XSEG_CONF";

impl Config {
    /// The defaults with `text` applied.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown or repeated key, a value out of range, or a contradiction.
    pub fn parse(text: &str) -> Result<Self> {
        let mut config = Self::default();
        config.apply(text)?;
        config.check()?;
        Ok(config)
    }

    /// The defaults with the environment variable `XSEG_CONF` applied, where it is set.
    ///
    /// # Errors
    /// As [`Config::parse`]; also for a value that is not UTF-8.
    pub fn from_env() -> Result<Self> {
        let mut config = Self::default();
        config.apply_env()?;
        config.check().map_err(of_variable)?;
        Ok(config)
    }

    /// Applies the environment variable as one layer; see [`Config::apply`].
    ///
    /// # Errors
    /// As [`Config::apply`]; also for a value that is not UTF-8.
    pub fn apply_env(&mut self) -> Result<()> {
        match std::env::var(VARIABLE) {
            Ok(text) => self.apply(&text).map_err(of_variable),
            Err(std::env::VarError::NotPresent) => Ok(()),
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(of_variable(Error::Config("the value is not UTF-8; write plain `key:value,key:value`".into())))
            }
        }
    }

    /// Applies one layer of settings over those present, all of them or, on an error, none. Layers are
    /// applied from the weakest to the strongest; contradictions are looked for by [`Config::check`]
    /// when all are in.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown key, one given twice in `text`, or a value out of range.
    pub fn apply(&mut self, text: &str) -> Result<()> {
        let mut next = self.clone();
        let mut seen = [false; KEYS.len()];
        let entries: Vec<&str> = text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
        for (number, entry) in entries.iter().copied().enumerate() {
            let Some((name, value)) = entry.split_once(':') else {
                let why = cut_off(&entries[..number], &entries[number..]).unwrap_or_else(|| no_value(entry));
                return Err(Error::Config(why));
            };
            let (name, value) = (name.trim(), value.trim());
            let Some(at) = KEYS.iter().position(|key| key.name == name) else {
                return Err(Error::Config(unknown(name)));
            };
            if std::mem::replace(&mut seen[at], true) {
                return Err(Error::Config(format!("`{name}` is given twice; keep one of the two")));
            }
            KEYS[at].set(&mut next, value)?;
        }
        *self = next;
        Ok(())
    }

    /// Looks for contradictions between settings, and for what the heap relies on and fields alone do not ensure.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key, or the two keys.
    pub fn check(&self) -> Result<()> {
        if self.small_limit > SMALL_LIMIT_MAX {
            let (set, most) = (size_text(self.small_limit), size_text(SMALL_LIMIT_MAX));
            return Err(Error::Config(format!("`small_limit:{set}` is out of range; it is at most {most}")));
        }
        if let Some(SizeOrShare::Bytes(limit)) = self.limit {
            for (name, bytes) in [("warmup", self.warmup), ("keep", self.keep)] {
                if bytes > limit {
                    return Err(Error::Config(format!(
                        "`{name}:{}` is more than `limit:{}`; lower `{name}` or raise `limit`",
                        size_text(bytes),
                        size_text(limit)
                    )));
                }
            }
        }
        if self.peers != Peers::None && matches!(self.backend, BackendChoice::Host | BackendChoice::Sim) {
            let backend = KEYS.iter().find(|key| key.name == "backend").map_or_else(String::new, |key| key.show(self));
            return Err(Error::Config(format!(
                "`peers` is for GPUs, and `backend:{backend}` is none; drop `peers` or use `backend:cuda`"
            )));
        }
        if let Some(reserve) = self.reserve
            && self.warmup > reserve
        {
            return Err(Error::Config(format!(
                "`warmup:{}` is more than the addresses of `reserve:{}`; lower `warmup` or raise `reserve`",
                size_text(self.warmup),
                size_text(reserve)
            )));
        }
        Ok(())
    }
}

/// The settings that differ from the defaults, in the order of the table; [`Config::parse`] reads it back.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for key in &KEYS {
            let value = key.show(self);
            if value != key.default {
                let comma = if first { "" } else { "," };
                write!(f, "{comma}{}:{value}", key.name)?;
                first = false;
            }
        }
        Ok(())
    }
}

/// The error of a setting that the environment variable has.
fn of_variable(error: Error) -> Error {
    match error {
        Error::Config(why) => Error::Config(format!("{VARIABLE}: {why}")),
        other => other,
    }
}

/// What is wrong with an entry that is the rest of the value before it, where a comma was written into that.
fn cut_off(before: &[&str], from: &[&str]) -> Option<String> {
    let (name, value) = before.last()?.split_once(':')?;
    let (entry, numbers) = (from.first()?, |text: &&&str| text.split('+').all(|part| part.parse::<u32>().is_ok()));
    match name.trim() {
        "peers" if numbers(&entry) && numbers(&&value.trim()) => {
            let more: Vec<&str> = from.iter().take_while(numbers).copied().collect();
            let all = format!("{}+{}", value.trim(), more.join("+"));
            Some(format!("{} has no value; for several devices write `peers:{}`", quoted(entry), clipped(&all)))
        }
        "plan" if !entry.contains('=') && KEYS.iter().all(|key| !key.name.eq_ignore_ascii_case(entry)) => {
            Some(format!(
                "{} has no value; if it belongs to the path of `plan`, name the file by one without a comma",
                quoted(entry)
            ))
        }
        _ => None,
    }
}

fn no_value(entry: &str) -> String {
    let shown = quoted(entry);
    let named = |name: &str| KEYS.iter().find(|key| key.name.eq_ignore_ascii_case(name.trim()));
    match entry.split_once('=').and_then(|(name, value)| Some((named(name)?, value))) {
        Some((key, value)) => format!("{shown} has no colon; write `{}:{}`", key.name, clipped(value.trim())),
        None => match named(entry) {
            Some(key) if key.name == entry => format!("{shown} has no value; allowed: {}", key.values),
            Some(key) => format!("{shown} has no value; did you mean `{}`? Allowed for it: {}", key.name, key.values),
            None if entry.eq_ignore_ascii_case("off") => {
                let meant =
                    if entry == "off" { String::new() } else { format!("{shown} has no value; did you mean `off`? ") };
                format!(
                    "{meant}`off` stands alone, and is for `xseg.install()` in Python, which leaves PyTorch its own allocator then; for all else unset XSEG_CONF, or leave it empty"
                )
            }
            None => format!("{shown} has no value; write `key:value`, with one of the keys {}", names()),
        },
    }
}

fn unknown(name: &str) -> String {
    let (shown, small) = (quoted(name), name.to_ascii_lowercase());
    let part_of = |key: &&Key| small.len() > 2 && key.name.contains(&small);
    let by_distance = || KEYS.iter().map(|key| (distance(key.name, &small), key.name)).min().filter(|near| near.0 <= 2);
    match KEYS.iter().find(part_of).map(|key| key.name).or_else(|| by_distance().map(|near| near.1)) {
        Some(near) => format!("there is no key {shown}; did you mean `{near}`? The keys are {}", names()),
        None => format!("there is no key {shown}; the keys are {}", names()),
    }
}

fn names() -> String {
    KEYS.map(|key| key.name).join(", ")
}

/// Somebody else's text, short and escaped.
fn quoted(text: &str) -> String {
    format!("`{}`", clipped(text))
}

fn clipped(text: &str) -> String {
    crate::shown::text(text.as_bytes(), 60)
}

/// Levenshtein distance in characters; long texts are far from everything.
fn distance(key: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().take(32).collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in key.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in other.iter().enumerate() {
            let swap = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = swap.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}
