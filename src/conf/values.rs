//! Sizes, shares, factors and durations as text.
#![forbid(unsafe_code)]

use crate::units::{GIB, KIB, MIB};
use std::time::Duration;

const TIB: u64 = 1 << 40;
/// Decimals that shares and factors keep, so that text and value agree exactly.
const DECIMALS: f64 = 1e6;

pub(super) const SIZE_FORM: &str = "a size such as 2MiB, 512K, 40G or plain bytes";
pub(super) const DURATION_FORM: &str = "a duration such as 5s, 200ms or 50us";

/// A decimal number of the command line, exact.
#[cfg(feature = "cli")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ratio {
    scaled: u128,
    scale: u128,
}

#[cfg(feature = "cli")]
impl Ratio {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        decimal(text).map(|(scaled, scale)| Self { scaled, scale })
    }

    /// The number itself, as near as 64 bits come.
    pub(crate) fn value(self) -> f64 {
        self.scaled as f64 / self.scale as f64
    }

    /// This many times `bytes`, rounded down; the largest number where it is more.
    pub(crate) fn of(self, bytes: u64) -> u64 {
        let times = self.scaled.saturating_mul(u128::from(bytes)) / self.scale;
        u64::try_from(times).unwrap_or(u64::MAX)
    }
}

/// A decimal number as an integer over a power of ten: `1.5` is (15, 10).
fn decimal(text: &str) -> Option<(u128, u128)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || whole.len() > 20 || fraction.len() > 12 || !digits(whole) || !digits(fraction) {
        return None;
    }
    if text.ends_with('.') {
        return None;
    }
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let parsed: u128 = whole.parse().ok()?;
    let rest: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    Some((parsed * scale + rest, scale))
}

fn split_unit(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    (number, unit.trim())
}

/// What is wrong with a number whose unit is none.
fn no_unit(number: &str, unit: &str, units: &str, form: &str) -> String {
    // What is no word is no slip of a unit's either.
    if decimal(number).is_some() && unit.len() < 16 && unit.bytes().all(|byte| byte.is_ascii_alphabetic()) {
        format!("there is no unit {unit}; write {units}")
    } else {
        format!("it is not {form}")
    }
}

/// Bytes of `2MiB`, `512K`, `1.5G`, `4096` (binary units; fractions rounded down to a byte).
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = split_unit(text);
    let unit = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => KIB,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        "t" | "tib" => TIB,
        "kb" | "mb" | "gb" | "tb" => {
            return Err(format!("the unit {unit} can mean two sizes; write KiB, MiB, GiB or TiB"));
        }
        _ => return Err(no_unit(number, unit, "KiB, MiB, GiB or TiB", SIZE_FORM)),
    };
    let (scaled, scale) = decimal(number).ok_or_else(|| format!("it is not {SIZE_FORM}"))?;
    let bytes = scaled.checked_mul(u128::from(unit)).map(|bytes| bytes / scale);
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).ok_or_else(|| "it is more than 2^64 bytes".to_owned())
}

/// A size in the largest unit that divides it: `2MiB`, `1GiB`, `1000`.
pub(crate) fn size_text(bytes: u64) -> String {
    let units = [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
    match units.iter().find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

/// A share such as `90%`, as a number (0.9), kept to six decimals of a percent.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').map(str::trim_end).ok_or("it is not a share such as 90%")?;
    let percent = factor(number).map_err(|_| "it is not a share such as 90%")?;
    Ok(percent / 100.0)
}

pub(super) fn share_text(share: f64) -> String {
    format!("{}%", factor_text(share * 100.0))
}

/// A plain number such as `1.5`, kept to six decimals.
pub(super) fn factor(text: &str) -> Result<f64, String> {
    let wrong = || "it is not a number such as 1.5".to_owned();
    let (scaled, scale) = decimal(text).ok_or_else(wrong)?;
    let value = scaled as f64 / scale as f64;
    Ok((value * DECIMALS).round() / DECIMALS)
}

pub(super) fn factor_text(factor: f64) -> String {
    let text = format!("{factor:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `5s`, `200ms`, `50us`, `10ns`, `2min`, `1h`, and a bare `0`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let wrong = || format!("it is not {DURATION_FORM}");
    let nanos: u128 = match unit {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" if number == "0" => 1,
        "" => return Err("it has no unit; write ns, us, ms, s, min or h after the number".into()),
        "m" => return Err("m is no unit of time; write min for minutes or ms for milliseconds".into()),
        _ => return Err(no_unit(number, unit, "ns, us, ms, s, min or h", DURATION_FORM)),
    };
    let (scaled, scale) = decimal(number).ok_or_else(wrong)?;
    let total = scaled.checked_mul(nanos).map(|nanos| nanos / scale);
    let total = total.and_then(|nanos| u64::try_from(nanos).ok());
    total.map(Duration::from_nanos).ok_or_else(|| "it is longer than 500 years".to_owned())
}

/// A duration in the largest unit up to seconds that divides it: `5s`, `200ms`, `0s`.
pub(super) fn duration_text(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    match units.iter().find(|(unit, _)| nanos.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{}{name}", nanos / unit),
        None => format!("{nanos}ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("2MiB"), Ok(2 << 20));
        assert_eq!(size("512K"), Ok(512 << 10));
        assert_eq!(size("40G"), Ok(40 << 30));
        assert_eq!(size("1.5gib"), Ok(3 << 29));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("16777215TiB"), Ok(16_777_215 << 40));
        for bad in ["", "G", "-1", "1e9", "10GB", "1.", ".5", "1..5", "2^20", "16777216TiB", "99999999999999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(size_text(3 << 29), "1536MiB");
        assert_eq!(size_text(0), "0");
        assert_eq!(size_text(1000), "1000");
    }

    #[test]
    fn shares_and_factors() {
        assert_eq!(share("90%"), Ok(0.9));
        assert_eq!(share_text(share("0.05%").unwrap()), "0.05%");
        assert_eq!(share_text(share("7%").unwrap()), "7%");
        assert_eq!(factor_text(1.1), "1.1");
        assert!(share("90").is_err() && share("%").is_err() && factor("nan").is_err());
    }

    #[test]
    fn durations() {
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(duration("0.5us"), Ok(Duration::from_nanos(500)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration_text(Duration::from_millis(1500)), "1500ms");
        assert_eq!(duration_text(Duration::ZERO), "0s");
        assert!(duration("5").is_err() && duration("5 weeks").is_err() && duration("99999999999999h").is_err());
    }
}
