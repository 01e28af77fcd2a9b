//! What the owner of a name writes into its lock file.

use crate::credentials::our_uid;
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, ftruncate, openat};
use rustix::io::{pread, pwrite};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

/// More than any owner writes: a file name of at most 107 bytes and a number.
const MAX_BYTES: usize = 256;

/// How to reach whoever owns a socket's name.
///
/// It is written as two lines, `control=NAME` and `pid=NUMBER`. A reader takes it as a hint: an
/// owner that died leaves its text behind, which no longer means anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The file name of the control socket, in the directory of the lock file.
    pub control: String,
    /// The process id of the launcher, in its own namespace.
    pub pid: u32,
}

/// What the lock file of `socket` says; `None` where there is none, where it is not ours, or where
/// it says anything else.
pub fn read_owner(socket: &Path) -> Option<Owner> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(CWD, super::lock_path(socket), flags, Mode::empty()).ok()?;
    let stat = fstat(&file).ok()?;
    let trusted =
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_uid == our_uid().ok()?;
    if trusted { read(file) } else { None }
}

pub(super) fn read(file: impl AsFd) -> Option<Owner> {
    let mut buffer = [0; MAX_BYTES + 1];
    let length = pread(file, &mut buffer[..], 0).ok()?;
    if length > MAX_BYTES {
        return None;
    }
    parse(std::str::from_utf8(&buffer[..length]).ok()?)
}

pub(super) fn write(file: impl AsFd, owner: &Owner) -> io::Result<()> {
    // Of the same length whatever the number, so that one owner's text takes the place of another's in one
    // step: a process that is killed while it takes over a name must not make it unreachable.
    let text = format!("control={}\npid={:010}\n", owner.control, owner.pid);
    if parse(&text).as_ref() != Some(owner) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it cannot hold {owner:?}"),
        ));
    }
    let written = pwrite(&file, text.as_bytes(), 0)?;
    if written < text.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    // Of what was there before, and longer.
    ftruncate(&file, text.len() as u64)?;
    Ok(())
}

fn parse(text: &str) -> Option<Owner> {
    let (control, rest) = text.strip_prefix("control=")?.split_once('\n')?;
    let pid = rest.strip_prefix("pid=")?.strip_suffix('\n')?;
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_file_name = (1..=crate::path::MAX_PATH_BYTES).contains(&control.len())
        && control.bytes().all(allowed)
        && !control.starts_with('.');
    let pid: u32 = pid.parse().ok().filter(|&pid| pid > 0)?;
    is_file_name.then(|| Owner {
        control: control.to_owned(),
        pid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn anything_but_two_whole_lines_says_nothing() {
        let owner = Owner {
            control: "weightd-control_1.sock".to_owned(),
            pid: 42,
        };
        assert_eq!(parse("control=weightd-control_1.sock\npid=42\n"), Some(owner));
        for text in [
            "",
            "control=a\n",
            "control=a\npid=42",
            "control=a\npid=0\n",
            "control=a\npid=4294967296\n",
            "control=../a\npid=42\n",
            "control=.\npid=42\n",
            "control=\npid=42\n",
            "pid=42\ncontrol=a\n",
            "control=a\npid=42\nmore\n",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse(&format!("control={}\npid=1\n", "a".repeat(108))), None);
    }

    #[test]
    fn every_owner_of_a_name_writes_as_much() {
        let length = |pid| {
            let temp = tempfile::tempfile().unwrap();
            let control = "weightd-control_0123456789abcdef.sock".to_owned();
            write(&temp, &Owner { control, pid }).unwrap();
            temp.metadata().unwrap().len()
        };
        assert_eq!(length(1), length(u32::MAX));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_what_cannot_be_read_is_not_written(
            control in "[a-z._/\\n-]{0,8}|[a-z]{100,120}", pid: u32, before in ".{0,400}",
        ) {
            let temp = tempfile::tempfile().unwrap();
            pwrite(&temp, before.as_bytes(), 0).unwrap();
            let owner = Owner { control, pid };
            if write(&temp, &owner).is_ok() {
                prop_assert_eq!(read(&temp), Some(owner));
            } else {
                prop_assert_eq!(parse(&format!("control={}\npid={pid}\n", owner.control)), None);
            }
        }

        #[test]
        fn garbage_is_read_as_nothing(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let temp = tempfile::tempfile().unwrap();
            pwrite(&temp, &bytes, 0).unwrap();
            if let Some(owner) = read(&temp) {
                let text = format!("control={}\npid={}\n", owner.control, owner.pid);
                prop_assert_eq!(text.as_bytes(), &bytes);
            }
        }
    }
}
