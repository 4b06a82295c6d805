//! Which files a command line names.
#![forbid(unsafe_code)]

use crate::trace::TraceError;
use std::path::{Path, PathBuf};

const ENDINGS: [&str; 3] = [".trace", ".pickle", ".pkl"];

/// The files named: files as they are, folders as the traces in them, in order of name. Also what
/// cannot be listed, in sentences.
pub(super) fn expand(paths: &[PathBuf]) -> (Vec<PathBuf>, Vec<String>) {
    let (mut files, mut wrong) = (Vec::new(), Vec::new());
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        match list(path) {
            Ok(found) if found.is_empty() => wrong.push(format!(
                "the folder {} holds no trace; name one with files that end in .trace or .pickle (or those with .xz, .zst)",
                path.display()
            )),
            Ok(found) => files.extend(found),
            Err(error) => wrong.push(format!("cannot list {}: {error}; check its permissions", path.display())),
        }
    }
    (files, wrong)
}

/// What is wrong with a file, with its name once.
pub(super) fn unreadable(file: &Path, error: &TraceError) -> String {
    match error {
        TraceError::Open { .. } => error.to_string(),
        _ => format!("{}: {error}", file.display()),
    }
}

fn list(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in folder.read_dir()? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let plain = name.strip_suffix(".xz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
        if ENDINGS.iter().any(|ending| plain.ends_with(ending)) && entry.path().is_file() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
