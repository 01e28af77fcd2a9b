//! The right to a socket's name: one owner at a time, whoever tries and whatever happens to the file.

mod common;

use common::*;
use rustix::io::{FdFlags, fcntl_getfd};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use tempfile::tempdir;
use weightd_socket::connect::pair;
use weightd_socket::lock::{Lock, LockError, Owner, Standing, read_owner, standing};
use weightd_socket::message::{receive, send};

fn lock_file(socket: &Path) -> PathBuf {
    PathBuf::from(format!("{}.lock", socket.display()))
}

fn owner() -> Owner {
    Owner {
        control: "weightd-control_00000000000000ff.sock".to_owned(),
        pid: 42,
    }
}

#[test]
fn of_100_threads_that_want_a_name_one_gets_it() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let start = Barrier::new(100);
    let results: Vec<_> = std::thread::scope(|scope| {
        let attempt = || {
            start.wait();
            Lock::acquire(&socket)
        };
        let threads: Vec<_> = (0..100).map(|_| scope.spawn(attempt)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (winners, losers): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!(winners.len(), 1);
    losers.into_iter().for_each(assert_owned);
}

#[test]
fn who_finds_the_name_taken_learns_by_whom() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    assert_eq!(read_owner(&socket), None);
    let lock = Lock::acquire(&socket).unwrap();
    assert_eq!(read_owner(&socket), None);
    lock.write_owner(&Owner {
        control: "a".repeat(100),
        pid: u32::MAX,
    })
    .unwrap();
    lock.write_owner(&owner()).unwrap();
    assert_eq!(read_owner(&socket), Some(owner()));
    match Lock::acquire(&socket) {
        Err(error @ LockError::AlreadyOwned { .. }) => {
            assert!(error.to_string().contains("already owns"), "{error}");
            assert!(error.to_string().contains("pid 42"), "{error}");
            let LockError::AlreadyOwned { owner: found, .. } = error else {
                unreachable!()
            };
            assert_eq!(found, Some(owner()));
        }
        other => panic!("{other:?}"),
    }
    drop(lock);
    let _next = Lock::acquire(&socket).unwrap();
    assert_eq!(read_owner(&socket), None, "a dead owner's text is erased");
}

#[test]
fn a_process_that_lives_under_a_dead_owners_number_does_not_keep_its_name() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let dead = Lock::acquire(&socket).unwrap();
    let pid = std::process::id();
    dead.write_owner(&Owner { pid, ..owner() }).unwrap();
    drop(dead);
    assert_eq!(read_owner(&socket).map(|owner| owner.pid), Some(pid));
    assert!(Lock::acquire(&socket).is_ok());
}

#[test]
fn an_owner_that_could_not_be_read_back_is_not_written() {
    let temp = tempdir().unwrap();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    for control in ["../elsewhere", "", "two\nlines", &"a".repeat(300)] {
        assert!(
            lock.write_owner(&Owner {
                control: control.to_owned(),
                pid: 1
            })
            .is_err(),
            "{control:?}"
        );
    }
}

#[test]
fn a_name_is_free_again_only_when_the_last_copy_of_the_lock_is_closed() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    lock.write_owner(&owner()).unwrap();

    let (ours, theirs) = pair().unwrap();
    send(&ours, b"l", &[lock.as_fd()]).unwrap();
    drop(lock);
    assert_owned(Lock::acquire(&socket));

    let mut received = Vec::new();
    receive(&theirs, &mut [0], &mut received).unwrap();
    let adopted = Lock::adopt(received.pop().unwrap().1, &socket).unwrap();
    assert!(adopted.still_ours());
    assert_eq!(read_owner(&socket), Some(owner()), "taking over erases nothing");
    assert_owned(Lock::acquire(&socket));

    drop(OwnedFd::from(adopted));
    Lock::acquire(&socket).unwrap();
}

#[test]
fn a_descriptor_that_is_not_the_lock_is_not_taken_over() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let _lock = Lock::acquire(&socket).unwrap();
    let stranger: OwnedFd = tempfile::tempfile_in(temp.path()).unwrap().into();
    assert!(matches!(
        Lock::adopt(stranger, &socket),
        Err(LockError::Replaced { .. })
    ));
    let another_description: OwnedFd = std::fs::File::open(lock_file(&socket)).unwrap().into();
    assert_owned(Lock::adopt(another_description, &socket));
    let no_file: OwnedFd = std::fs::File::open(temp.path()).unwrap().into();
    assert!(matches!(
        Lock::adopt(no_file, &socket),
        Err(LockError::Foreign { .. })
    ));
}

#[test]
fn an_owner_notices_that_its_lock_file_was_unlinked_or_replaced() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    assert!(lock.still_ours());
    std::fs::remove_file(lock_file(&socket)).unwrap();
    assert!(!lock.still_ours());
    assert_eq!(standing(&lock, &socket), Standing::Removed);
    let next = Lock::acquire(&socket).unwrap();
    assert!(next.still_ours());
    assert!(!lock.still_ours());
    assert_eq!(standing(&lock, &socket), Standing::Replaced);
    assert_eq!(standing(&next, &socket), Standing::Ours);
    assert_eq!(standing(&next, &socket.join("below")), Standing::Removed);
    let too_long = socket.with_file_name("x".repeat(300));
    assert_eq!(standing(&next, &too_long), Standing::Unknown);
    assert!(matches!(lock.remove(), Err(LockError::Replaced { .. })));
    assert!(next.still_ours(), "the file of the next owner was left alone");
}

#[test]
fn a_lock_taken_on_an_unlinked_file_is_worth_nothing() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    drop(Lock::acquire(&socket).unwrap());
    let opened_before: OwnedFd = std::fs::File::open(lock_file(&socket)).unwrap().into();
    std::fs::remove_file(lock_file(&socket)).unwrap();
    assert!(matches!(
        Lock::adopt(opened_before, &socket),
        Err(LockError::Replaced { .. })
    ));
}

#[test]
fn while_a_cleaner_removes_lock_files_no_two_owners_both_have_the_path() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    std::thread::scope(|scope| {
        let cleaner = scope.spawn(|| {
            for _ in 0..2_000 {
                let _ = std::fs::remove_file(lock_file(&socket));
                std::thread::yield_now();
            }
        });
        let mut owners: Vec<Lock> = Vec::new();
        while !cleaner.is_finished() {
            if let Ok(lock) = Lock::acquire(&socket) {
                assert!(!owners.iter().any(Lock::still_ours), "two owners");
                owners.truncate(8);
                owners.insert(0, lock);
            }
        }
    });
}

#[test]
fn a_name_given_up_for_good_leaves_no_file() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    Lock::acquire(&socket).unwrap().remove().unwrap();
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    Lock::acquire(&socket).unwrap();
}

#[test]
fn the_lock_file_is_private_and_not_inherited() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    assert_eq!(
        lock_file(&socket).metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    assert!(fcntl_getfd(&lock).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn what_is_no_file_of_ours_is_not_locked() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let path = lock_file(&socket);
    let refused = |what: &str| match Lock::acquire(&socket) {
        Err(LockError::Foreign { what: found, .. }) => assert!(found.contains(what), "{found}"),
        other => panic!("{what}: {other:?}"),
    };

    let target = temp.path().join("precious");
    std::fs::write(&target, "precious").unwrap();
    symlink(&target, &path).unwrap();
    refused("symbolic link");
    std::fs::remove_file(&path).unwrap();

    std::fs::hard_link(&target, &path).unwrap();
    refused("another name");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");

    std::fs::create_dir(&path).unwrap();
    refused("not a regular file");
    std::fs::remove_dir(&path).unwrap();

    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    refused("not a regular file");
    assert_eq!(read_owner(&socket), None, "and reading it does not wait");
}

#[test]
fn a_lock_file_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    std::fs::write(lock_file(&socket), "control=a\npid=1\n").unwrap();
    assert!(read_owner(&socket).is_some());
    chown(lock_file(&socket), Some(STRANGER), None).unwrap();
    assert_eq!(read_owner(&socket), None);
    match Lock::acquire(&socket) {
        Err(LockError::Foreign { what, .. }) => assert!(what.contains("12345"), "{what}"),
        other => panic!("{other:?}"),
    }
}
