//! Where `--save` writes.

use crate::error::CliError;
use std::fs;
use std::path::Path;

/// Refuses a directory that holds a checkpoint: what is saved there would be read as a part of it.
pub fn check(dir: &Path) -> Result<(), CliError> {
    // What else is wrong with it shows when it is written to.
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    match names.find(|name| name == "config.json" || is_of_checkpoint(name)) {
        None => Ok(()),
        Some(name) => Err(CliError::Usage(format!(
            "--save {}: it holds a checkpoint ({name}), which what is saved would be taken for a part of: name another \
             directory",
            dir.display()
        ))),
    }
}

/// Whether a file holds weights, and no rank of ours that was saved before.
fn is_of_checkpoint(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else {
        return false;
    };
    let mut parts = stem.split('_');
    let is_number = |part: &str| part.parse::<u32>().is_ok();
    let mut is_next = |prefix| {
        let part = parts.next().and_then(|part| part.strip_prefix(prefix));
        part.is_some_and(is_number)
    };
    let is_rank = is_next("dp") && is_next("pp") && is_next("tp");
    !is_rank || parts.next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_may_be_saved_again_and_weights_of_others_stay_alone() {
        let dir = tempfile::tempdir().unwrap();
        check(&dir.path().join("absent")).unwrap();
        for harmless in ["dp0_pp1_tp12.safetensors", "notes.txt", "safetensors"] {
            fs::write(dir.path().join(harmless), "").unwrap();
            check(dir.path()).unwrap();
        }
        for theirs in [
            "config.json",
            "model.safetensors",
            "dp0_pp0.safetensors",
            "dp0_pp0_tp0_of.safetensors",
            "dp0_pp0_tpx.safetensors",
        ] {
            let path = dir.path().join(theirs);
            fs::write(&path, "").unwrap();
            let error = check(dir.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("({theirs})")), "{error}");
            fs::remove_file(&path).unwrap();
        }
    }
}
