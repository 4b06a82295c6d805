//! `XSEG_CONF`: what is read, what is refused, and that errors say what to do.

use proptest::prelude::*;
use std::time::Duration;
use xseg::Error;
use xseg::conf::{KEYS, markdown_table};
use xseg::config::{BackendChoice, Config, CrossStream, Defrag, Growth, Peers, RemapMode, Shrink, SizeOrShare};

fn error(text: &str) -> String {
    match Config::parse(text) {
        Err(Error::Config(why)) => why,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn every_key_is_read() {
    let config = Config::parse(
        "limit:40G, reserve:1TiB,growth:step=64MiB,handle_max:128MiB,warmup:1GiB,shrink:idle=5s,keep:512M,\
         defrag:eager,slack:5%,small_limit:512K,cross_stream:wait,remap:quiesce,backend:cuda=3,peers:0+2,plan:/runs/a:b.plan,\
         stats:on,nvtx:on,wait_limit:200ms",
    )
    .unwrap();
    assert_eq!(config.limit, Some(SizeOrShare::Bytes(40 << 30)));
    assert_eq!(config.reserve, Some(1 << 40));
    assert_eq!(config.growth, Growth::Step(64 << 20));
    assert_eq!(config.handle_max, 128 << 20);
    assert_eq!(config.warmup, 1 << 30);
    assert_eq!(config.shrink, Shrink::Idle(Duration::from_secs(5)));
    assert_eq!(config.keep, 512 << 20);
    assert_eq!(config.defrag, Defrag::Eager);
    assert_eq!(config.slack, Some(0.05));
    assert_eq!(config.small_limit, 512 << 10);
    assert_eq!(config.cross_stream, CrossStream::Wait);
    assert_eq!(config.remap, RemapMode::Quiesce);
    assert_eq!(config.backend, BackendChoice::Cuda(3));
    assert_eq!(config.peers, Peers::Listed(vec![0, 2]));
    assert_eq!(config.plan.as_deref(), Some(std::path::Path::new("/runs/a:b.plan")));
    assert!(config.stats && config.nvtx);
    assert_eq!(config.wait_limit, Duration::from_millis(200));
}

#[test]
fn other_values() {
    let parse = |text| Config::parse(text).unwrap();
    assert_eq!(parse("limit:90%").limit, Some(SizeOrShare::Share(0.9)));
    assert_eq!(parse("growth:geometric=1.1").growth, Growth::Geometric(1.1));
    assert_eq!(parse("shrink:watermark=25%").shrink, Shrink::Watermark(0.25));
    assert_eq!(parse("slack:auto").slack, None);
    assert_eq!(parse("slack:unlimited").slack, Some(f64::INFINITY));
    assert_eq!(parse("backend:sim").backend, BackendChoice::Sim);
    assert_eq!(parse("peers:all").peers, Peers::All);
    assert_eq!(parse("peers:1").to_string(), "peers:1");
    assert_eq!(parse("peers:1+2").to_string(), "peers:1+2");
    assert_eq!(parse(""), Config::default());
    assert_eq!(parse(",stats:off,"), Config::default());
}

#[test]
fn the_table_shows_the_defaults() {
    let config = Config::default();
    for key in &KEYS {
        assert_eq!(key.show(&config), key.default, "{}", key.name);
        assert_eq!(Config::parse(&format!("{}:{}", key.name, key.default)).unwrap(), config, "{}", key.name);
        assert!(markdown_table().contains(&format!("| `{}` | `{}` |", key.name, key.default)));
    }
    assert_eq!(config.to_string(), "");
}

#[test]
fn unknown_keys_get_a_suggestion() {
    assert!(error("limt:4G").contains("did you mean `limit`"));
    assert!(error("wait:4s").contains("did you mean `wait_limit`"));
    let why = error("expandable_segments:True");
    assert!(why.contains("no key `expandable_segments`") && why.contains("handle_max, handles, warmup"), "{why}");
    assert!(error("limit=4G").contains("write `limit:4G`"));
    assert!(error("stats").contains("on or off"));
    assert!(error("limit:4G,limit:5G").contains("twice"));
}

#[test]
fn slips_get_a_hint() {
    for (text, hint) in [
        ("limit:40Gi", "there is no unit Gi; write KiB, MiB, GiB or TiB; allowed: auto, a size"),
        ("reserve:40 gigs", "there is no unit gigs; write KiB"),
        ("limit:4..5G", "it is not a size such as 2MiB"),
        ("wait_limit:5m", "m is no unit of time; write min for minutes or ms for milliseconds"),
        ("wait_limit:5sec", "there is no unit sec; write ns, us, ms, s, min or h"),
        ("wait_limit:5S", "did you mean `wait_limit:5s`? allowed: a duration"),
        ("peers:1,2", "`2` has no value; for several devices write `peers:1+2`"),
        // There would be no such list.
        ("peers:all,1", "`1` has no value; write `key:value`"),
        ("peers:none,1,2", "`1` has no value; write `key:value`"),
        ("stats:on,peers:0+1, 2,3,limit:4G", "`2` has no value; for several devices write `peers:0+1+2+3`"),
        ("limit:4G,2", "`2` has no value; write `key:value`"),
        (
            "plan:/runs/a,b.plan",
            "`b.plan` has no value; if it belongs to the path of `plan`, name the file by one without",
        ),
        ("plan:/runs/a,stats", "`stats` has no value; allowed: on or off"),
        ("plan:/runs/a,stats=on", "`stats=on` has no colon; write `stats:on`"),
        ("LIMIT:4G", "there is no key `LIMIT`; did you mean `limit`? The keys"),
        ("Wait-Limit:4s", "did you mean `wait_limit`?"),
        ("LIMIT=4G", "`LIMIT=4G` has no colon; write `limit:4G`"),
        ("STATS", "`STATS` has no value; did you mean `stats`? Allowed for it: on or off"),
        ("defrag:EAGER", "did you mean `defrag:eager`? allowed: on_pressure"),
        ("OFF", "`OFF` has no value; did you mean `off`? `off` stands alone, and is for `xseg.install()`"),
    ] {
        let why = error(text);
        assert!(why.contains(hint), "{text}: {why}");
    }
}

#[test]
fn text_that_is_not_readable_is_shown_escaped() {
    assert!(error("\u{1b}[31m").starts_with(r"`\u{1b}[31m` has no value"), "{}", error("\u{1b}[31m"));
    assert!(error("\u{7}:1").contains(r"no key `\u{7}`"));
    assert!(error("limit:4\u{202e}G").contains(r"`limit:4\u{202e}G`"));
}

#[test]
fn the_switch_of_the_python_package_is_told_from_a_key() {
    let why = error("off");
    assert!(why.contains("`off` stands alone, and is for `xseg.install()` in Python"), "{why}");
}

#[test]
fn values_out_of_range_name_the_key_and_what_is_allowed() {
    for (text, allowed) in [
        ("limit:0", "a size from 2MiB"),
        ("limit:101%", "up to 100%"),
        ("limit:0%", "up to 100%"),
        ("limit:-1", "a size"),
        ("limit:10GB", "write KiB, MiB, GiB or TiB"),
        ("reserve:3T", "to 2TiB"),
        ("growth:fast", "geometric=FACTOR"),
        ("growth:geometric=1", "above 1"),
        ("growth:step=1K", "step=SIZE (2MiB"),
        ("handle_max:47MiB", "multiple of 2MiB"),
        ("handle_max:2GiB", "up to 1GiB"),
        ("shrink:idle=5", "idle=DURATION"),
        ("small_limit:2MiB", "from 0 to 1MiB"),
        ("slack:nan%", "such as 5%"),
        ("cross_stream:yes", "passed, off, or wait"),
        ("backend:cuda=99999999999", "device number"),
        ("peers:", "none, all"),
        ("peers:1+", "device number"),
        ("peers:some", "none, all"),
        ("wait_limit:forever", "such as 5s"),
    ] {
        let why = error(text);
        let key = text.split(':').next().unwrap();
        assert!(why.contains(&format!("`{key}:")) && why.contains(allowed), "{text}: {why}");
    }
}

#[test]
fn contradictions_name_both_keys() {
    let why = error("limit:1GiB,warmup:2GiB");
    assert!(why.contains("`warmup:2GiB` is more than `limit:1GiB`"), "{why}");
    assert!(error("limit:1GiB,keep:2GiB").contains("`keep:2GiB`"));
    assert!(error("peers:all,backend:host").contains("`peers` is for GPUs, and `backend:host` is none"));
    assert!(Config::parse("peers:1+2,backend:cuda").is_ok());
    assert!(error("reserve:1GiB,warmup:2GiB").contains("`reserve:1GiB`"));
    assert!(Config::parse("cross_stream:wait,remap:quiesce").is_ok());
}

#[test]
fn stronger_layers_win_and_a_bad_layer_changes_nothing() {
    let mut config = Config::default();
    config.apply("limit:1G,stats:on").unwrap();
    config.apply("limit:2G").unwrap();
    assert_eq!(config.to_string(), "limit:2GiB,stats:on");
    config.apply("warmup:4G,bogus:1").unwrap_err();
    assert_eq!(config.warmup, 0);
    config.apply("warmup:4G").unwrap();
    assert!(config.check().is_err());
}

fn arbitrary_value() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("auto".to_owned()),
        "[0-9]{1,3}(\\.[0-9]{1,4})?%",
        "[0-9]{1,4}(\\.[0-9]{1,3})?(B|K|M|G|T|KiB|MiB|GiB)?",
        "[0-9]{1,5}(ns|us|ms|s|min|h)",
        "(idle|watermark|step|geometric|cuda)=[0-9]{1,3}(\\.[0-9])?(%|s|ms|MiB)?",
        "(exact|never|oom|on_pressure|eager|off|passed|wait|concurrent|quiesce|host|sim|on|unlimited)",
    ]
}

proptest! {
    #[test]
    fn random_text_never_panics(text in ".{0,120}") {
        let _ = Config::parse(&text);
    }

    #[test]
    fn what_is_read_is_written_back(entries in prop::collection::vec((0..KEYS.len(), arbitrary_value()), 0..5)) {
        let text = entries.iter().map(|(at, value)| format!("{}:{value}", KEYS[*at].name)).collect::<Vec<_>>().join(",");
        if let Ok(config) = Config::parse(&text) {
            prop_assert_eq!(&Config::parse(&config.to_string()).unwrap(), &config, "{}", text);
        }
    }
}
