//! Traces of every form are read to the same events, and hostile ones end in typed errors.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/pickle.rs"]
mod pickle;

use pickle::{Py, entry};
use proptest::prelude::*;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use xseg::trace::{Action, Block, Event, Trace, TraceError};

const SMALL: &str =
    "# a trace\n# {\"mode\": \"test\"}\na,7,1000,0,0\na,8,512,3,10\nu,7,3,20\nf,7,30\na,7,0,3,40\nf,8,50\n";

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(name)
}

fn read(bytes: &[u8]) -> Result<Trace, TraceError> {
    Trace::from_bytes("test", bytes)
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    for trace in [read(SMALL.as_bytes()).unwrap(), Trace::load(&shipped("fsdp.trace.xz")).unwrap()] {
        let mut text = Vec::new();
        trace.write_text(&mut text).unwrap();
        let again = Trace::from_bytes(&trace.name, &text).unwrap();
        assert_eq!((&again.events, &again.blocks, &again.streams), (&trace.events, &trace.blocks, &trace.streams));
        assert_eq!((again.peak_requested(), again.meta_json), (trace.peak_requested(), trace.meta_json.clone()));
    }
}

#[test]
fn events_blocks_streams_and_peak() {
    let trace = read(SMALL.as_bytes()).unwrap();
    let event = |time_us, block, action| Event { time_us, block, action };
    assert_eq!(
        trace.events,
        [
            event(0, 0, Action::Alloc),
            event(10, 1, Action::Alloc),
            event(20, 0, Action::Use(1)),
            event(30, 0, Action::Free),
            event(40, 2, Action::Alloc),
            event(50, 1, Action::Free),
        ]
    );
    let block = |bytes, stream| Block { bytes, stream };
    assert_eq!(trace.blocks, [block(1000, 0), block(512, 1), block(0, 1)]);
    assert_eq!(trace.streams, [0, 3]);
    assert_eq!((trace.peak_requested(), trace.live_at_end()), (1512, 1));
    assert_eq!(trace.meta_json, r#"{"mode": "test"}"#);
}

#[test]
fn every_compression_gives_the_same_trace() {
    let plain = read(SMALL.as_bytes()).unwrap();
    assert_eq!(read(&xz(SMALL.as_bytes())).unwrap(), plain);
    assert_eq!(read(&zstd::encode_all(SMALL.as_bytes(), 3).unwrap()).unwrap(), plain);
    // Content counts, not the name; Windows line ends and blank lines are no matter.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.trace");
    std::fs::write(&path, xz(SMALL.replace('\n', "\r\n\r\n").as_bytes())).unwrap();
    let loaded = Trace::load(&path).unwrap();
    assert_eq!((loaded.name.as_str(), &loaded.events), ("small", &plain.events));
}

#[test]
fn shipped_traces_have_the_peaks_that_their_headers_state() {
    for name in ["gpt2", "llama_varlen"] {
        let trace = Trace::load(&shipped(&format!("{name}.trace.xz"))).unwrap();
        let meta: serde_json::Value = serde_json::from_str(&trace.meta_json).unwrap();
        assert_eq!(trace.name, name);
        assert_eq!(Some(trace.peak_requested()), meta["peak_requested"].as_u64(), "{name}");
        assert_eq!(Some(trace.events.len() as u64), meta["events"].as_u64(), "{name}");
        assert_eq!(trace.notes, [""; 0]);
    }
}

#[test]
fn the_shipped_snapshot_counts_or_explains_every_entry() {
    let trace = Trace::load(&shipped("llama_tiny_snapshot.pickle.xz")).unwrap();
    assert_eq!(trace.name, "llama_tiny_snapshot");
    assert_eq!(trace.blocks.len(), 3670);
    let frees = trace.events.iter().filter(|event| event.action == Action::Free).count();
    assert_eq!((frees, trace.live_at_end()), (3609, 61));
    assert_eq!(trace.events.len(), 3670 + 3609);
    // Nothing was lost of this history: 7,218 halves of frees, 3,670 allocations, and the segments' entries.
    assert_eq!(trace.notes, ["besides 10888 allocations and frees the history holds 86 segment_map"]);
    assert_eq!(trace.events[0].time_us, 0);
    assert!(trace.peak_requested() > 1 << 30);
}

#[test]
fn a_history_that_lost_its_start_is_mended_and_explained() {
    let block = |address, size, state| {
        Py::Dict(vec![("address", Py::Int(address)), ("size", Py::Int(size)), ("state", Py::Text(state))])
    };
    let blocks =
        vec![block(4096, 512, "active_allocated"), block(4608, 1024, "inactive"), block(8192, 64, "active_allocated")];
    let segment = Py::Dict(vec![("device", Py::Int(0)), ("stream", Py::Int(9)), ("blocks", Py::List(blocks))]);
    let history = vec![
        entry("free_completed", 100, 512, 1000), // its request is lost
        entry("free_requested", 200, 512, 1001), // allocated before the history
        entry("free_completed", 200, 512, 1002),
        entry("alloc", 8192, 64, 1003),
        entry("free_requested", 300, 0, 1004), // not even its size is known
        entry("alloc", 200, 2048, 1005),
        entry("alloc", 200, 4096, 1006), // the free between is lost
        entry("oom", 0, 0, 1007),
    ];
    let snapshot =
        Py::Dict(vec![("segments", Py::List(vec![segment])), ("device_traces", Py::List(vec![Py::List(history)]))]);
    let trace = read(&snapshot.pickle()).unwrap();
    let sizes: Vec<u64> = trace.blocks.iter().map(|block| block.bytes).collect();
    assert_eq!(sizes, [512, 512, 64, 2048, 4096]);
    assert_eq!((trace.stream_of(0), trace.stream_of(1)), (5, 9));
    assert_eq!((trace.live_at_end(), trace.peak_requested()), (3, 512 + 64 + 4096));
    let all = trace.notes.join("\n");
    for part in [
        "1 block live at the end",
        "1 block freed without",
        "1 free completed whose",
        "1 free of what is not live",
        "1 block allocated at",
        "1 oom",
    ] {
        assert!(all.contains(part), "{part} in {all}");
    }
}

#[test]
fn bad_lines_say_where_and_what() {
    for (text, line, why) in [
        ("a,0,10,0,0\nhello\n", 2, "it is no event"),
        ("a,0,10,0\n", 1, "TIME_US is missing"),
        ("a,0,10\n", 1, "STREAM is missing"),
        ("a,0,10,\n", 1, "STREAM is missing"),
        ("a,0\n", 1, "BYTES is missing"),
        ("a,\n", 1, "ID is missing"),
        ("a,0,,0,0\n", 1, "BYTES is missing"),
        ("a,0,10,0,0\nf,0\n", 2, "TIME_US is missing"),
        ("a,0,10,0,0\nu,0\n", 2, "STREAM is missing"),
        ("a,0,10,x,0\n", 1, "STREAM is no number"),
        ("a,0,99999999999999999999999,0,0\n", 1, "BYTES is no number"),
        ("a,0,999999999999999999,0,0\n", 1, "more than 256 TiB"),
        ("a,0,10,0,18446744073709551615\n", 1, "TIME_US is out of range"),
        ("a,0,10,0,0,\n", 1, "something follows TIME_US"),
        ("a,0,10,0,0,1\n", 1, "something follows"),
        ("a,-1,10,0,0\n", 1, "ID is no number"),
        ("a,\u{e9},10,0,0\n", 1, "ID is no number"),
    ] {
        match read(text.as_bytes()) {
            Err(error @ TraceError::Line { line: at, why: reason, .. }) => {
                assert_eq!((at, reason.contains(why)), (line, true), "{text}: {reason}");
                assert!(error.to_string().contains("lines are a,ID,BYTES"), "{error}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    assert_eq!(read(b"a,5,1,0,0\na,5,1,0,0\n"), Err(TraceError::Duplicate { line: 2, id: 5 }));
    assert_eq!(read(b"a,5,1,0,0\nf,5,0\nf,5,0\n"), Err(TraceError::Unknown { line: 3, id: 5 }));
    assert_eq!(read(b"u,18446744073709551615,0,0\n"), Err(TraceError::Unknown { line: 1, id: u64::MAX }));
    assert_eq!(read(b"# nothing\n"), Err(TraceError::Empty));
    assert_eq!(read(b""), Err(TraceError::Empty));
    assert!(matches!(read(b"a,0,1,0,\xff\xfe\n"), Err(TraceError::Line { line: 1, .. })));
    assert!(matches!(read(&vec![b'#'; 2 << 20]), Err(TraceError::Line { line: 1, .. })));
}

/// What a file holds may be anything; what a terminal shows of it is text.
#[test]
fn bytes_of_a_file_are_shown_escaped() {
    let said = read(b"\x1b]0;title\x07\xe5\xff\0 and so on\n").unwrap_err().to_string();
    assert!(said.starts_with(r"line 1 (`\u{1b}]0;title\u{7}\xe5\xff\0 and so on`): it is no event"), "{said}");
    let said = read(&[b'x'; 100]).unwrap_err().to_string();
    assert!(said.contains(&format!("(`{}…`)", "x".repeat(60))), "{said}");
    // Names of actions come from the file, too.
    let history = Py::List(vec![entry("alloc", 4096, 512, 0), entry("\u{1b}[2J", 0, 0, 1)]);
    let snapshot = Py::Dict(vec![("segments", Py::List(vec![])), ("device_traces", Py::List(vec![history]))]);
    let notes = read(&snapshot.pickle()).unwrap().notes;
    assert!(notes.iter().any(|note| note.ends_with(r"1 \u{1b}[2J")), "{notes:?}");
}

#[test]
fn a_file_that_is_named_a_pickle_and_is_none_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let load = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).unwrap();
        Trace::load(&folder.path().join(name))
    };
    let noise: Vec<u8> = (0..100u32).map(|at| (at * 151 + 0xe5) as u8).collect();
    for (name, bytes) in [("a.pickle", noise.clone()), ("a.pkl", noise.clone()), ("a.pickle.xz", xz(&noise))] {
        let said = load(name, &bytes).unwrap_err();
        assert!(matches!(&said, TraceError::NoPickle { start } if start.starts_with(r"\xe5")), "{name}: {said}");
        let said = said.to_string();
        assert!(said.starts_with("the file is no pickle") && said.contains("_dump_snapshot(path)"), "{said}");
        assert!(!said.contains(char::is_control) && !said.contains(char::REPLACEMENT_CHARACTER), "{said}");
    }
    // Elsewhere the form of a line is what helps, and a trace is read whatever its name.
    assert!(matches!(load("a.trace", &noise), Err(TraceError::Line { line: 1, .. })));
    assert!(matches!(load("b.pickle", b"a,0,10,0,0\nf,0\n"), Err(TraceError::Line { line: 2, .. })));
    assert!(load("c.pickle", b"a,0,10,0,0\n").is_ok());
}

#[test]
fn numbers_that_do_not_count_up_are_fine() {
    let trace = read(b"a,18446744073709551615,1,0,5\na,123456789012,2,0,3\nf,18446744073709551615,9\n").unwrap();
    assert_eq!(trace.peak_requested(), 3);
    assert_eq!(trace.events[1].time_us, 5, "time never falls");
    assert!(trace.notes[0].contains("1 event earlier than the one before"));
}

#[test]
fn damaged_files_say_so() {
    let good = std::fs::read(shipped("gpt2.trace.xz")).unwrap();
    let cut = read(&good[..good.len() / 2]);
    assert!(matches!(&cut, Err(TraceError::Read { line, .. }) if *line > 100), "{cut:?}");
    assert!(cut.unwrap_err().to_string().contains("cut off or damaged"));
    let zst = zstd::encode_all(SMALL.as_bytes(), 3).unwrap();
    assert!(matches!(read(&zst[..zst.len() - 9]), Err(TraceError::Read { .. })));
    let missing = Trace::load(Path::new("/no/such.trace")).unwrap_err();
    assert!(missing.to_string().contains("check the path"), "{missing}");
    assert!(matches!(Trace::load(Path::new(env!("CARGO_MANIFEST_DIR"))), Err(TraceError::Open { .. })));
}

#[test]
fn a_small_file_that_unfolds_to_gigabytes_is_refused() {
    // Half a gibibyte of spaces after the first byte of a pickle.
    let mut bomb = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    bomb.write_all(&[0x80]).unwrap();
    let piece = vec![b' '; 1 << 20];
    for _ in 0..257 {
        bomb.write_all(&piece).unwrap();
    }
    let bomb = bomb.finish().unwrap();
    assert!(bomb.len() < 1 << 20);
    let Err(error) = read(&bomb) else { panic!("more than may be was read") };
    assert_eq!(error, TraceError::SnapshotTooLarge { most: xseg::trace::PICKLE_MAX });
    let said = error.to_string();
    assert!(said.contains("larger than 256 MiB") && said.contains("_record_memory_history(context=None)"), "{said}");
}

#[test]
fn hostile_pickles_are_refused() {
    let pickle = |bytes: &[u8]| read(&[&[0x80, 4], bytes].concat());
    let refused = |bytes: &[u8]| match pickle(bytes) {
        Err(TraceError::Pickle { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    // os.system("true"), as a pickle would run it.
    assert!(refused(b"cos\nsystem\n\x8c\x04true\x85R.").contains("never run"));
    assert!(refused(&vec![b'('; 1 << 20]).contains("nested too deeply"));
    assert!(refused(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff").contains("ends too early"));
    assert!(refused(b"h\x07.").contains("never stored"));
    assert!(refused(b"}(K\x01u.").contains("no value"));
    assert!(refused(b"Ke").contains("ends too early"));
    // A million lists, each in the next, and lists that hold the last one twice: no recursion, no unfolding.
    let deep = [&vec![b']'; 1 << 20][..], &vec![b'a'; (1 << 20) - 1], b"."].concat();
    assert!(matches!(pickle(&deep), Err(TraceError::NotASnapshot(_))));
    let doubling = [b"]".to_vec(), b"2\x86".repeat(1 << 16), b".".to_vec()].concat();
    assert!(matches!(pickle(&doubling), Err(TraceError::NotASnapshot(_))));
    let itself = b"}\x94\x8c\x0ddevice_traces]\x94(h\x00h\x01eh\x01\x86es.";
    assert!(pickle(itself).is_err());
    let empty = Py::Dict(vec![("device_traces", Py::List(vec![Py::List(vec![])]))]).pickle();
    assert!(read(&empty).unwrap_err().to_string().contains("_record_memory_history"));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), head in 0usize..4) {
        let heads: [&[u8]; 4] = [b"", b"\x80\x04", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"];
        let _ = read(&[heads[head], &bytes].concat());
    }

    #[test]
    fn random_lines_never_panic(lines in prop::collection::vec("[afu#],[0-9]{1,3}(,[0-9]{1,4}){0,4}", 0..40)) {
        if let Ok(trace) = read(lines.join("\n").as_bytes()) {
            prop_assert!(trace.events.len() <= lines.len());
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_damaged_snapshot_never_panics(at in 0usize..900_000, byte in any::<u8>()) {
        static PLAIN: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let plain = PLAIN.get_or_init(|| {
            let file = std::fs::File::open(shipped("llama_tiny_snapshot.pickle.xz")).unwrap();
            let mut plain = Vec::new();
            std::io::Read::read_to_end(&mut liblzma::read::XzDecoder::new(file), &mut plain).unwrap();
            plain
        });
        let mut bytes = plain.clone();
        bytes[at] = byte;
        let _ = read(&bytes);
    }
}
