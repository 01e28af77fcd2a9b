//! seccomp: which system calls a server may make.
//!
//! A list of what is allowed, since a list of what is not would miss whatever a later kernel adds. A C library may come
//! to use other calls for the same thing after an update, and a filter that ends a server for that is worse than none. So
//! the list holds whole families, with the old and the new call for each thing, and whatever is not on it is answered
//! with ENOSYS, as by a kernel that does not have it: a C library runs on those too, and falls back to what is older.
//! (EPERM has it give up instead, as containers found out with `clone3`.) Only a call of another architecture kills.

use libc::{c_int, c_long};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::env::consts::ARCH;

/// Refuses everything that serving does not need: programs, other processes, sockets of its own, files other than those
/// that landlock leaves, memory that is code or a file, calls to drivers (a descriptor of CUDA memory can be handed
/// on and not used), and whatever else a kernel has.
pub fn restrict() -> Result<(), String> {
    let arch = TargetArch::try_from(ARCH).map_err(|_| format!("no seccomp: not known for {ARCH}"))?;
    let program = program(arch).map_err(|error| format!("no seccomp: {error}"))?;
    apply_filter(&program).map_err(|error| format!("no seccomp: {error}"))
}

fn program(arch: TargetArch) -> Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for &call in ALWAYS.iter().chain(ALWAYS_OF_OLD) {
        rules.insert(call, Vec::new());
    }
    for (call, tests) in sometimes() {
        let conditions = tests.into_iter().map(|(argument, length, bits, are)| {
            SeccompCondition::new(argument, length, SeccompCmpOp::MaskedEq(bits), are)
        });
        let conditions = conditions.collect::<Result<Vec<_>, _>>()?;
        rules.entry(call).or_default().push(SeccompRule::new(conditions)?);
    }
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, unknown, SeccompAction::Allow, arch)?.try_into()
}

/// Allowed whatever the arguments.
const ALWAYS: &[c_long] = &[
    // What is open: read, written, asked about, closed.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    // Lock files and names, where landlock lets it.
    libc::SYS_openat,
    libc::SYS_unlinkat,
    libc::SYS_flock,
    libc::SYS_ftruncate,
    // Sockets that it was given, and their connections.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    // Two ends of its own, which lead nowhere else: tokio makes them with each of its runtimes where any package of a
    // build has its `signal` feature, as the examples do.
    libc::SYS_socketpair,
    // Waiting, of every runtime.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Memory that is no file and no code: below.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads and signals.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Who and what it is.
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
];

/// The older calls for the same things, which newer architectures never had.
#[cfg(target_arch = "x86_64")]
const ALWAYS_OF_OLD: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_time,
    libc::SYS_getrlimit,
];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_OF_OLD: &[c_long] = &[];

/// Of an argument, by its number and as much of it as the kernel looks at, these bits must be exactly those.
type Test = (u8, SeccompCmpArgLen, u64, u64);

/// Allowed where the arguments pass all tests of one line.
fn sometimes() -> Vec<(c_long, Vec<Test>)> {
    let bits = |bits: c_int| u64::from(bits as u32);
    let of = |argument, of: c_int, are: c_int| (argument, SeccompCmpArgLen::Dword, bits(of), bits(are));
    let is = |argument, value: u32| {
        (
            argument,
            SeccompCmpArgLen::Dword,
            u64::from(u32::MAX),
            u64::from(value),
        )
    };
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    let no_code = of(2, libc::PROT_EXEC, 0);
    vec![
        // A thread of this process: no child, no namespace. `clone3` is on no list, since its flags are in memory,
        // where they cannot be looked at; a C library takes `clone` then.
        (
            libc::SYS_clone,
            vec![of(0, libc::CLONE_THREAD | namespaces, libc::CLONE_THREAD)],
        ),
        // Memory that is no file and no code.
        (
            libc::SYS_mmap,
            vec![of(3, libc::MAP_ANONYMOUS, libc::MAP_ANONYMOUS), no_code.clone()],
        ),
        (libc::SYS_mprotect, vec![no_code]),
        // Limits are asked for and not set: no new ones are pointed to.
        (
            libc::SYS_prlimit64,
            vec![(2, SeccompCmpArgLen::Qword, u64::MAX, 0)],
        ),
        // Descriptors: duplicates, flags, seals; but no signals to whom one likes.
        (libc::SYS_fcntl, vec![is(1, libc::F_DUPFD as u32)]),
        (libc::SYS_fcntl, vec![is(1, libc::F_DUPFD_CLOEXEC as u32)]),
        (libc::SYS_fcntl, vec![is(1, libc::F_GETFD as u32)]),
        (libc::SYS_fcntl, vec![is(1, libc::F_SETFD as u32)]),
        (libc::SYS_fcntl, vec![is(1, libc::F_GETFL as u32)]),
        (
            libc::SYS_fcntl,
            vec![is(1, libc::F_SETFL as u32), of(2, libc::O_ASYNC, 0)],
        ),
        (libc::SYS_fcntl, vec![is(1, libc::F_GET_SEALS as u32)]),
        (libc::SYS_fcntl, vec![is(1, libc::F_ADD_SEALS as u32)]),
        // Names of threads, and of memory.
        (libc::SYS_prctl, vec![is(0, libc::PR_SET_NAME as u32)]),
        (libc::SYS_prctl, vec![is(0, libc::PR_SET_VMA as u32)]),
        // Its own threads only: `abort` does that.
        (libc::SYS_tgkill, vec![is(0, std::process::id())]),
        // What the standard library asks of sockets and terminals; nothing of a driver.
        (libc::SYS_ioctl, vec![is(1, libc::FIONBIO as u32)]),
        (libc::SYS_ioctl, vec![is(1, libc::FIOCLEX as u32)]),
        (libc::SYS_ioctl, vec![is(1, libc::TCGETS as u32)]),
        (libc::SYS_ioctl, vec![is(1, libc::TIOCGWINSZ as u32)]),
    ]
}
