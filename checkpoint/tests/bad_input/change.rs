//! Files that change under the reader.

use super::*;
use weightd_checkpoint::LoadError;

#[test]
fn a_file_that_changes_after_it_was_opened() {
    type Change = fn(&File);
    let changes: [(&str, Change); 3] = [
        ("then, 100 now", |file| file.set_len(100).unwrap()),
        ("then, 2000000 now", |file| file.set_len(2_000_000).unwrap()),
        ("its times moved", |file| {
            file.set_modified(std::time::UNIX_EPOCH).unwrap()
        }),
    ];
    for name in ["config.json", "model.safetensors"] {
        for (expected, change) in changes {
            let dir = linked("qwen3");
            replace(&dir, name, fs::read(data("qwen3").join(name)).unwrap());
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            checkpoint.unchanged().unwrap();
            change(&File::options().write(true).open(dir.path().join(name)).unwrap());
            let read = checkpoint.digest(&Default::default(), &Default::default());
            let LoadError::Checkpoint(read) = read.unwrap_err() else {
                panic!("not the file's fault")
            };
            for error in [checkpoint.unchanged().unwrap_err(), read] {
                check_message(&error, &[name, "changed while it was read", expected]);
                assert_is!(error, CheckpointError::Changed { .. });
            }
        }
    }
}

#[test]
fn a_file_that_another_replaces_stays_readable() {
    let dir = linked("qwen3");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let digest = checkpoint
        .digest(&Default::default(), &Default::default())
        .unwrap();
    replace(&dir, "model.safetensors", "another");
    checkpoint.unchanged().unwrap();
    assert_eq!(
        checkpoint
            .digest(&Default::default(), &Default::default())
            .unwrap(),
        digest,
        "the open file is read, whatever its name means now"
    );
}
