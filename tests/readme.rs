//! The README and design.md against the code: what they state is checked, so that they cannot drift.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use xseg::conf::markdown_table;

const README: &str = include_str!("../README.md");
const DESIGN: &str = include_str!("../design.md");
const MANIFEST: &str = include_str!("../Cargo.toml");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Lines of the README's shell blocks.
fn shell() -> impl Iterator<Item = &'static str> {
    README.split("```sh\n").skip(1).flat_map(|block| block.split("```").next().unwrap().lines())
}

#[test]
fn the_table_of_keys_is_the_codes() {
    assert!(README.contains(&markdown_table()), "the README's table must be:\n{}", markdown_table());
}

#[test]
fn one_command_runs_the_main_job_and_one_the_tests() {
    let job = shell().find(|line| line.starts_with("cargo run")).expect("a command that replays");
    let words: Vec<&str> = job.split_whitespace().collect();
    assert_eq!(words[..5], ["cargo", "run", "--release", "--", "replay"]);
    assert!(root().join(words[5]).is_dir(), "{} is shipped", words[5]);
    assert!(shell().any(|line| line == "cargo test"));
}

#[test]
fn the_traces_of_the_table_are_shipped() {
    let table = README.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.ends_with("ok     │")).collect();
    let mut shipped = 0;
    for entry in std::fs::read_dir(root().join("traces")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.split('.').next().unwrap().to_owned();
        assert!(rows.iter().any(|row| row.starts_with(&format!("│ {name} "))), "{name} is not in the table");
        shipped += 1;
    }
    assert_eq!(rows.len(), shipped);
}

#[test]
fn the_stated_rust_version_is_the_manifests() {
    let line = MANIFEST.lines().find(|line| line.starts_with("rust-version")).unwrap();
    let version = line.split('"').nth(1).unwrap();
    assert!(README.contains(&format!("Rust {version} ")), "the README must name Rust {version}");
}

/// Rust files of a folder, with those of its folders.
fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

/// Names after `crate::` in a line, also those of `crate::{a, b}`.
fn uses(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in line.split("crate::").skip(1) {
        let name: String = part.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
        assert!(!part.starts_with('{'), "one `use crate::` a module, so that this can be read: {line}");
        if !name.is_empty() {
            found.push(name);
        }
    }
    found
}

#[test]
fn a_file_uses_only_rows_below_its_own() {
    let picture = DESIGN.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let mut rows: HashMap<&str, usize> = HashMap::new();
    for (number, line) in picture.lines().enumerate() {
        // "row │ modules of the row │ what they are"
        let Some(modules) = line.split('│').nth(1) else { continue };
        rows.extend(modules.split_whitespace().map(|module| (module, number)));
    }
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let mut wrong = Vec::new();
    for file in files {
        let inside = file.strip_prefix(root().join("src")).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        let module = first.trim_end_matches(".rs");
        if matches!(module, "lib" | "main" | "bin") {
            continue;
        }
        let row = rows.get(module).unwrap_or_else(|| panic!("`{module}` is not in the picture of design.md"));
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for name in uses(line) {
                let right = name == module || rows.get(name.as_str()).is_none_or(|below| below > row);
                if !right {
                    wrong.push(format!("{}: {}", inside.display(), line.trim()));
                }
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn invariants_that_the_code_cites_are_listed() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let host = std::fs::read_to_string(root().join("src/backend/host/mod.rs")).unwrap();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for word in text.split(|c: char| !c.is_ascii_alphanumeric()) {
            let number = word.get(1..).unwrap_or("");
            if number.is_empty() || number.len() > 2 || !number.bytes().all(|b| b.is_ascii_digit()) {
                continue;
            }
            let listed = match &word[..1] {
                "I" => DESIGN.contains(&format!("* **{word}** ")),
                "H" => host.contains(&format!("- **{word}** ")),
                _ => true,
            };
            assert!(listed, "{} cites {word}, which nothing lists", file.display());
        }
    }
}
