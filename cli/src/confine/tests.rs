//! What a confined process still can, and what not.

use super::*;
use rustix::event::epoll::{self, CreateFlags};
use rustix::fs::{CWD, FlockOperation, MemfdFlags, Mode, OFlags, flock, ftruncate, memfd_create, openat};
use rustix::io::{Errno, ioctl_fionread};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, dumpable_behavior, getrlimit, pidfd_getfd, pidfd_open,
    test_kill_process,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, parent_id};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use weightd_core::content::HandleKind;

/// Names the directory that a body works in.
const DIR: &str = "WEIGHTD_TEST_CONFINED_DIR";

const MEMORY_BYTES: usize = 4096;

/// Runs a body of this test binary in a process of its own, which must end well.
#[track_caller]
fn succeeds(body: &str) {
    let temp = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("confine::tests::{body}")])
        .args(["--ignored", "--nocapture"])
        .env(DIR, temp.path())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
fn whoever_holds_a_confined_process_can_do_little() {
    succeeds("a_confined_process");
}

#[test]
fn landlock_alone_keeps_to_the_directory() {
    succeeds("a_process_under_landlock");
}

#[test]
fn a_process_without_core_dumps_has_neither_the_limit_nor_the_right() {
    succeeds("a_process_without_core_dumps");
}

/// What an attacker may want, and what a server may still need.
struct World {
    /// The socket directory, with a lock file in it.
    dir: PathBuf,
    lock: PathBuf,
    socket: PathBuf,
    listener: UnixListener,
    /// A directory that is none of the server's.
    elsewhere: PathBuf,
    tcp: TcpListener,
    abstract_name: SocketAddr,
    _abstract: UnixListener,
    namespace: File,
    /// Sealed memory, as a region.
    memory: OwnedFd,
    parent: (Pid, OwnedFd),
}

impl World {
    fn new(temp: &Path) -> World {
        let (dir, elsewhere) = (temp.join("sockets"), temp.join("elsewhere"));
        fs::create_dir(&dir).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        let (lock, socket) = (dir.join("x.lock"), dir.join("x.sock"));
        File::create(&lock).unwrap();
        File::create(elsewhere.join("old")).unwrap();
        let abstract_name = SocketAddr::from_abstract_name(temp.as_os_str().as_encoded_bytes()).unwrap();
        let parent = Pid::from_raw(parent_id() as i32).unwrap();
        World {
            listener: UnixListener::bind(&socket).unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            _abstract: UnixListener::bind_addr(&abstract_name).unwrap(),
            namespace: File::open("/proc/self/ns/uts").unwrap(),
            memory: weightd_gpu::sealed(&[1; MEMORY_BYTES]).unwrap(),
            parent: (parent, pidfd_open(parent, PidfdFlags::empty()).unwrap()),
            dir,
            lock,
            socket,
            elsewhere,
            abstract_name,
        }
    }

    /// What landlock refuses by itself. It leaves the world as it was.
    fn reaches_out(&self) -> Vec<(&'static str, io::Result<()>)> {
        let old = self.elsewhere.join("old");
        let (new, of_ours) = (self.elsewhere.join("new"), self.dir.join("new"));
        let address = self.tcp.local_addr().unwrap();
        vec![
            ("open a file", File::open(&old).map(drop)),
            ("write a file", File::options().write(true).open(&old).map(drop)),
            ("list a directory", fs::read_dir(&self.elsewhere).map(drop)),
            ("list our directory", fs::read_dir(&self.dir).map(drop)),
            (
                "rename a file",
                fs::rename(&old, &new).and_then(|()| fs::rename(&new, &old)),
            ),
            (
                "make a file",
                File::create(&new).and_then(|_| fs::remove_file(&new)),
            ),
            (
                "make a file of ours",
                File::create(&of_ours).and_then(|_| fs::remove_file(&of_ours)),
            ),
            ("start a program", Command::new("/bin/true").status().map(drop)),
            ("connect to a port", TcpStream::connect(address).map(drop)),
            ("listen on a port", TcpListener::bind("127.0.0.1:0").map(drop)),
            (
                "reach an abstract socket",
                UnixStream::connect_addr(&self.abstract_name).map(drop),
            ),
            (
                "signal a process",
                test_kill_process(self.parent.0).map_err(Into::into),
            ),
        ]
    }

    /// What the filter of system calls refuses beyond that.
    fn uses_the_kernel(&self) -> Vec<(&'static str, io::Result<()>)> {
        let taken = pidfd_getfd(&self.parent.1, 0, PidfdGetfdFlags::empty());
        let uts = Some(LinkNameSpaceType::HostNameAndNISDomainName);
        let limit = getrlimit(Resource::Nofile);
        let memory = self.memory.try_clone().unwrap();
        let uuid = weightd_gpu::Device::host(0).uuid();
        let mapped = weightd_gpu::Mapping::import(HandleKind::Memfd, memory, MEMORY_BYTES as u64, uuid);
        let mapped = mapped.map_err(|error| match error {
            weightd_gpu::MemoryError::System { source, .. } => source.into(),
            other => io::Error::other(other),
        });
        let results = [
            ("map a region", mapped.map(drop)),
            (
                "call a driver",
                ioctl_fionread(&self.listener)
                    .or_else(|error| match error {
                        // It is not for listeners, and was asked.
                        Errno::INVAL => Ok(0),
                        error => Err(error),
                    })
                    .map(drop)
                    .map_err(Into::into),
            ),
            ("connect to a socket", UnixStream::connect(&self.socket).map(drop)),
            ("take a descriptor", taken.map(drop).map_err(Into::into)),
            (
                "share memory",
                memfd_create("x", MemfdFlags::CLOEXEC)
                    .map(drop)
                    .map_err(Into::into),
            ),
            (
                "enter a namespace",
                move_into_link_name_space(self.namespace.as_fd(), uts).map_err(Into::into),
            ),
            (
                "set a limit",
                setrlimit(Resource::Nofile, limit).map_err(Into::into),
            ),
            (
                "change its own dumps",
                set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(Into::into),
            ),
        ];
        results.into()
    }
}

#[track_caller]
fn all_work(results: Vec<(&str, io::Result<()>)>) {
    for (what, result) in results {
        result.unwrap_or_else(|error| panic!("to {what}: {error}"));
    }
}

/// By the kernel, and not since there is nothing to be done.
#[track_caller]
fn all_are_refused(results: Vec<(&str, io::Result<()>)>) {
    for (what, result) in results {
        let error = result.expect_err(what);
        let code = Errno::from_io_error(&error);
        let codes = [Errno::ACCESS, Errno::PERM, Errno::NOSYS];
        assert!(
            code.is_some_and(|code| codes.contains(&code)),
            "to {what}: {error}"
        );
    }
}

fn work_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

#[test]
#[ignore = "the body of another process"]
fn a_process_under_landlock() {
    let Some(temp) = work_dir() else { return };
    let world = World::new(&temp);
    all_work(world.reaches_out());
    files::restrict(&world.dir).unwrap();
    all_are_refused(world.reaches_out());
    all_are_refused(vec![("become a program", Err(Command::new("/bin/true").exec()))]);
}

#[test]
#[ignore = "the body of another process"]
fn a_confined_process() {
    let Some(temp) = work_dir() else { return };
    let world = World::new(&temp);
    let mut client = UnixStream::connect(&world.socket).unwrap();
    all_work(world.reaches_out());
    // That last one is not for everybody.
    let worked = world.uses_the_kernel().into_iter();
    all_work(worked.filter(|(what, _)| *what != "enter a namespace").collect());

    let Confined {
        confinement,
        failures,
    } = confine(&world.dir);
    assert_eq!(failures, [""; 0], "this kernel has it all");
    assert_eq!(confinement.missing(), [""; 0]);
    all_are_refused(world.reaches_out());
    all_are_refused(world.uses_the_kernel());
    all_are_refused(vec![("become a program", Err(Command::new("/bin/true").exec()))]);
    // Threads that come later can be started, and are no better off.
    thread::scope(|scope| {
        let later = scope.spawn(|| {
            all_are_refused(world.reaches_out());
            all_are_refused(world.uses_the_kernel());
        });
        later.join().unwrap();
    });

    // What a server does for the rest of its life.
    let (mut connection, _) = world.listener.accept().unwrap();
    client.write_all(b"hello").unwrap();
    let mut heard = [0; 5];
    connection.read_exact(&mut heard).unwrap();
    connection.set_nonblocking(true).unwrap();
    epoll::create(CreateFlags::CLOEXEC).unwrap();
    weightd_socket::credentials::our_uid().unwrap();
    let lock = openat(CWD, &world.lock, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    ftruncate(&lock, 0).unwrap();
    fs::remove_file(&world.socket).unwrap();
    fs::remove_file(&world.lock).unwrap();
    assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
    // Memory in every size that an allocator asks for.
    for bytes in [1 << 4, 1 << 12, 1 << 20, 1 << 28] {
        assert_eq!(vec![1u8; bytes].last(), Some(&1));
    }
}

#[test]
#[ignore = "the body of another process"]
fn a_process_without_core_dumps() {
    no_core_dumps().unwrap();
    assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    let limit = getrlimit(Resource::Core);
    assert_eq!((limit.current, limit.maximum), (Some(0), Some(0)));
}
