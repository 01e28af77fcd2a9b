//! The directory and its files.

use super::*;

#[test]
fn a_directory_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap().path().join("gone");
    assert_is!(
        error(&dir, &["gone: no such directory"]),
        CheckpointError::NoSuchDirectory { .. }
    );
}

#[test]
fn a_file_for_a_directory() {
    let file = data("qwen3").join("config.json");
    assert_is!(
        error(&file, &["config.json: not a directory"]),
        CheckpointError::NotADirectory { .. }
    );
}

#[test]
fn no_config() {
    let dir = linked("qwen3");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_is!(
        error(dir.path(), &["no config.json"]),
        CheckpointError::NoConfig { .. }
    );
    let empty = tempfile::tempdir().unwrap();
    assert_is!(
        error(empty.path(), &["no config.json"]),
        CheckpointError::NoConfig { .. }
    );
}

#[test]
fn no_safetensors() {
    let dir = linked("qwen3");
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert_is!(
        error(dir.path(), &["no safetensors files"]),
        CheckpointError::NoSafetensors { .. }
    );
}

#[test]
fn only_other_formats_with_and_without_a_config() {
    for with_config in [true, false] {
        for name in [
            "pytorch_model.bin",
            "llama-Q4.gguf",
            "model.pt",
            "consolidated.00.pth",
            "flax_model.msgpack",
        ] {
            let dir = tempfile::tempdir().unwrap();
            if with_config {
                fs::copy(data("qwen3").join("config.json"), dir.path().join("config.json")).unwrap();
            }
            fs::write(dir.path().join(name), "x").unwrap();
            let error = error(dir.path(), &["no safetensors files", name, "save_pretrained"]);
            assert_is!(error, CheckpointError::OtherFormat { .. });
        }
    }
}

#[test]
fn a_long_list_of_other_files_is_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..9 {
        fs::write(dir.path().join(format!("part-{n}.bin")), "x").unwrap();
    }
    error(
        dir.path(),
        &["only part-0.bin, part-1.bin, part-2.bin, part-3.bin and 5 more"],
    );
}

#[test]
fn names_of_other_files_show_what_is_in_them() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a\u{9b}2J\u{3164}.bin"), "x").unwrap();
    error(dir.path(), &[r"only a\u{9b}2J\u{3164}.bin"]);
}

#[test]
fn several_files_without_an_index() {
    let dir = linked("llama");
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let expected = [
        "model-00001-of-00006.safetensors, ",
        "model.safetensors.index.json",
    ];
    assert_is!(error(dir.path(), &expected), CheckpointError::NoIndex { .. });
    for n in 2..=6 {
        fs::remove_file(dir.path().join(format!("model-0000{n}-of-00006.safetensors"))).unwrap();
    }
    let expected = ["model-00001-of-00006.safetensors but no model.safetensors.index.json"];
    assert_is!(error(dir.path(), &expected), CheckpointError::NoIndex { .. });
}

#[test]
fn files_that_are_not_regular_are_refused_without_waiting() {
    use std::os::unix::net::UnixListener;
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        type Make = fn(&Path);
        let make: [(&str, Make); 4] = [
            ("a directory", |path| fs::create_dir(path).unwrap()),
            ("a fifo", |path| {
                rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0)
                    .unwrap();
            }),
            ("a socket", |path| drop(UnixListener::bind(path).unwrap())),
            ("a character device", |path| symlink("/dev/zero", path).unwrap()),
        ];
        for (kind, make) in make {
            let dir = linked("qwen3");
            let path = dir.path().join(name);
            let _ = fs::remove_file(&path);
            make(&path);
            assert_is!(
                error(dir.path(), &[name, kind]),
                CheckpointError::NotRegular { .. }
            );
        }
    }
}

#[test]
fn a_link_to_a_blob_that_was_not_downloaded() {
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        let dir = linked("qwen3");
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        symlink("../../blobs/0123", &path).unwrap();
        let error = error(dir.path(), &[name, "symbolic link to nothing"]);
        assert_is!(error, CheckpointError::DanglingLink { .. });
    }
}

#[test]
fn a_directory_that_may_not_be_read() {
    use std::os::unix::fs::PermissionsExt;
    let dir = linked("qwen3");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o000)).unwrap();
    // Root may read it all the same.
    if File::open(dir.path()).is_err() {
        assert_is!(
            error(dir.path(), &["cannot open", "let this user read it"]),
            CheckpointError::Io { .. }
        );
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
}
