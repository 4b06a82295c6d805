//! The baselines against what the real allocators did on the shipped traces.

use super::*;
use crate::units::{GIB, GRANULE};
use std::collections::HashMap;

#[derive(Clone, Copy)]
enum Event {
    Alloc(u32, u64, u64),
    Free(u32),
    Use(u32, u64),
}

/// Events and the most bytes live at once.
fn trace(name: &str) -> (Vec<Event>, u64) {
    let path = format!("{}/traces/{name}.trace.xz", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(path).unwrap();
    let text = std::io::read_to_string(liblzma::read::XzDecoder::new(file)).unwrap();
    let (mut sizes, mut live, mut peak) = (HashMap::new(), 0u64, 0u64);
    let mut ids: HashMap<&str, u32> = HashMap::new();
    let mut events = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let field: Vec<_> = line.split(',').collect();
        let fresh = ids.len() as u32;
        let id = *ids.entry(field[1]).or_insert(fresh);
        match field[0] {
            "a" => {
                let bytes: u64 = field[2].parse().unwrap();
                sizes.insert(id, bytes);
                live += bytes;
                peak = peak.max(live);
                events.push(Event::Alloc(id, bytes, field[3].parse().unwrap()));
            }
            "f" => {
                live -= sizes[&id];
                events.push(Event::Free(id));
            }
            _ => events.push(Event::Use(id, field[2].parse().unwrap())),
        }
    }
    (events, peak)
}

fn replay(name: &str, events: &[Event], limit: Option<u64>) -> Result<Figures, SubjectError> {
    let mut subject = create(name, limit, Timeline::default()).unwrap();
    let mut at: Vec<u64> = vec![0; events.len()];
    for event in events {
        match *event {
            Event::Alloc(id, bytes, stream) => at[id as usize] = subject.alloc(bytes, stream)?,
            Event::Free(id) => subject.free(at[id as usize])?,
            Event::Use(id, stream) => subject.record_use(at[id as usize], stream)?,
        }
    }
    let figures = subject.figures();
    subject.finish().unwrap();
    assert_eq!(subject.figures().reserved, 0);
    Ok(figures)
}

/// What the real allocators reserved with plenty of memory, in GiB, and the least memory that they
/// finished in over the most bytes live at once: the trace, native, expandable.
const MEASURED: [(&str, [f64; 2], [f64; 2]); 7] = [
    ("gpt2", [24.506, 24.412], [1.0067, 1.0025]),
    ("llama_varlen", [40.264, 33.828], [1.0585, 1.0067]),
    ("llama_ckpt", [36.893, 24.869], [1.1419, 1.0114]),
    ("moe", [19.709, 15.721], [1.0537, 1.0073]),
    ("vision_multires", [9.553, 9.086], [1.0555, 1.0061]),
    ("fsdp", [23.115, 16.568], [1.1520, 1.0079]),
    ("serve", [7.180, 6.391], [1.1336, 1.0234]),
];

#[test]
fn torch_reserves_and_needs_what_the_real_ones_do() {
    for (name, reserved, least) in MEASURED {
        let (events, peak) = trace(name);
        for (which, subject) in ["torch-native", "torch-expandable"].iter().enumerate() {
            let plenty = replay(subject, &events, None).unwrap();
            let gib = plenty.peak_reserved as f64 / GIB as f64;
            assert!((gib / reserved[which] - 1.0).abs() < 0.01, "{name} {subject}: {gib} GiB, not {}", reserved[which]);
            assert_eq!(plenty.retries, 0);
            let with = |factor: f64| replay(subject, &events, Some((peak as f64 * factor) as u64));
            let enough = with(least[which] * 1.01).unwrap_or_else(|e| panic!("{name} {subject}: {e}"));
            assert!(enough.peak_reserved as f64 <= peak as f64 * least[which] * 1.01);
            assert!(with(least[which] * 0.99).is_err(), "{name} {subject} should not fit");
        }
    }
}

#[test]
fn expandable_pays_for_its_flushes() {
    let (events, peak) = trace("fsdp");
    let figures = replay("torch-expandable", &events, Some(peak + peak / 50)).unwrap();
    let ms = figures.driver_nanos as f64 / 1e6;
    assert!((450.0..620.0).contains(&ms), "{ms}");
    // Pages only ever come from the driver and go back to it, some of them before they were mapped.
    assert_eq!(figures.calls.create - figures.calls.map, figures.calls.release - figures.calls.unmap);
    assert!(figures.retries > 10 && figures.handles_moved == 0, "{figures:?}");
}

/// Least limit over peak at which the replay completes, by halving, to 0.05 %.
fn least(name: &str, events: &[Event], peak: u64) -> f64 {
    let (mut low, mut high) = (0u64, 2000u64);
    while low < high {
        let middle = (low + high) / 2;
        let limit = peak + peak / 2000 * middle;
        if replay(name, events, Some(limit)).is_ok() { high = middle } else { low = middle + 1 }
    }
    1.0 + high as f64 / 2000.0
}

#[test]
#[ignore = "prints a survey"]
fn survey() {
    let only = std::env::var("SURVEY").unwrap_or_default();
    for name in ["gpt2", "llama_varlen", "llama_ckpt", "moe", "vision_multires", "fsdp", "serve"] {
        let (events, peak) = trace(name);
        for subject in NAMES.iter().filter(|subject| only.is_empty() || only.split(',').any(|o| o == **subject)) {
            let start = std::time::Instant::now();
            let plenty = replay(subject, &events, None).unwrap();
            let wall = start.elapsed().as_secs_f64();
            let tight = replay(subject, &events, Some(peak * 51 / 50 / GRANULE * GRANULE));
            let ms = tight.map_or(f64::NAN, |f| f.driver_nanos as f64 / 1e6);
            let least = if std::env::var("LEAST").is_ok() { least(subject, &events, peak) } else { 0.0 };
            println!(
                "{name:16} {subject:18} allocated {:.3} reserved {:.3} ({:.3}x) plenty {:.0} ms, at 1.02x {ms:.0} ms, least {least:.4}, {wall:.2} s",
                plenty.peak_allocated as f64 / GIB as f64,
                plenty.peak_reserved as f64 / GIB as f64,
                plenty.peak_reserved as f64 / peak as f64,
                plenty.driver_nanos as f64 / 1e6,
            );
        }
    }
}
