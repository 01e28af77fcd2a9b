//! Descriptors of every kind in the place of memory.

use crate::checkpoints::*;
use crate::harness::*;
use crate::publisher::{answer, of_model};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use weightd_core::wire::message::ErrorCode;

const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, bytes).unwrap();
    fcntl_add_seals(&memory, seals).unwrap();
    memory
}

/// The same open file, opened otherwise.
fn reopened(memory: &OwnedFd, flags: OFlags) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// What is no memory of `bytes` bytes that can never change.
fn others(bytes: u64, site: &Site) -> Vec<(String, OwnedFd)> {
    let named = |name: &str, descriptor: OwnedFd| (name.to_owned(), descriptor);
    let mut all: Vec<(String, OwnedFd)> = [
        SealFlags::WRITE,
        SealFlags::SHRINK,
        SealFlags::GROW,
        SealFlags::SEAL,
    ]
    .into_iter()
    .map(|missing| named(&format!("without {missing:?}"), memory(bytes, SEALS - missing)))
    .collect();
    let path = site.path().join("file");
    fs::write(&path, vec![0; bytes as usize]).unwrap();
    let (pipe, _) = std::io::pipe().unwrap();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let future = (SEALS - SealFlags::WRITE) | SealFlags::FUTURE_WRITE;
    all.extend([
        named("sealed against later writers alone", memory(bytes, future)),
        named("unsealed", memory(bytes, SealFlags::empty())),
        named("shorter", memory(bytes - 1, SEALS)),
        named("longer", memory(bytes + 1, SEALS)),
        named("a path only", reopened(&memory(bytes, SEALS), OFlags::PATH)),
        named("a file", File::open(&path).unwrap().into()),
        named("a directory", File::open(site.path()).unwrap().into()),
        named("a pipe", pipe.into()),
        named("a socket", socket.into()),
        named("zeros without end", File::open("/dev/zero").unwrap().into()),
        named("epoll", epoll::create(epoll::CreateFlags::CLOEXEC).unwrap()),
        named("eventfd", eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
    ]);
    match memfd_create(
        "huge",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB,
    ) {
        // Its size is a multiple of its pages', and so another than was stated.
        Ok(huge) if ftruncate(&huge, 2 << 20).is_ok() && fcntl_add_seals(&huge, SEALS).is_ok() => {
            all.push(named("huge pages", huge));
        }
        _ => eprintln!("skipped: no huge pages"),
    }
    all
}

#[test]
fn nothing_but_sealed_memory_of_the_stated_size_is_taken_for_content() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let mut launcher = site.start(site.weightd(&["serve"]));
    assert!(launcher.line().starts_with("SERVING "));
    let server = launcher.child("server");
    let open = || fs::read_dir(format!("/proc/{server}/fd")).unwrap().count();
    let good = of_model(&site, &qwen, 1).remove(0);
    let before = open();
    for (place, what) in ["the manifest", "the region"].into_iter().enumerate() {
        let content = &good.publish.content;
        let bytes = [content.manifest_bytes, content.regions[0].bytes][place];
        for (name, other) in others(bytes, &site) {
            let mut publication = of_model(&site, &qwen, 1).remove(0);
            publication.descriptors[place] = other;
            let (code, why) = publication.publish().unwrap_err();
            assert_eq!(code, ErrorCode::BadDescriptors, "{name} for {what}: {why}");
        }
        // The connection itself, and the place where it was made.
        let mut publication = of_model(&site, &qwen, 1).remove(0);
        let (ours, _) = weightd_socket::connect::connect(&publication.socket).unwrap();
        publication.descriptors[place] = ours;
        let (code, why) = publication.publish().unwrap_err();
        assert_eq!(
            code,
            ErrorCode::BadDescriptors,
            "its own kind of socket for {what}: {why}"
        );
    }
    // Too few and too many, and of sizes that cannot be.
    for (lie, descriptors) in [(0, 1), (0, 3), (u64::MAX, 2), (1 << 48, 2)] {
        let mut publication = of_model(&site, &qwen, 1).remove(0);
        publication.publish.content.regions[0].bytes |= lie;
        publication.descriptors.truncate(descriptors);
        publication
            .descriptors
            .extend((publication.descriptors.len()..descriptors).map(|_| memory(1, SEALS)));
        let (code, why) = answer(&publication.say(1.0)).unwrap_err();
        assert_eq!(code, ErrorCode::BadDescriptors, "{why}");
    }
    wait_until("all are closed", || open() <= before);
    assert_eq!(launcher.child("server"), server);
    good.publish().unwrap();
    site.attach_verified(&qwen, 1);

    // Memory that never changes and that nobody can read is no engine's either, and is in nobody's way.
    let generation = site.status()[0]["generation"].as_str().unwrap().to_owned();
    let mut unreadable = of_model(&site, &qwen, 1).remove(0).instead_of(&generation);
    unreadable.descriptors[0] = reopened(&unreadable.descriptors[0], OFlags::WRONLY);
    let published = unreadable.publish().unwrap();
    let error = site.attach(&qwen, 1, &["--all"]).error(1);
    assert!(error.contains("pread"), "{error}");
    let good = of_model(&site, &qwen, 1).remove(0);
    good.instead_of(&published.to_string()).publish().unwrap();
    site.attach_verified(&qwen, 1);
}
