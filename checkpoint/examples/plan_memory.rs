//! What it takes to plan one rank of the largest checkpoints, each in a process that does nothing
//! else: the time to open and plan, and by how much that raised the peak of its resident memory.

#[path = "../benches/giants/mod.rs"]
mod giants;

use giants::{cases, deepseek, llama, plan_one};
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{env, fs};
use weightd_checkpoint::Checkpoint;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [giant, case, dir] = args.as_slice() {
        print!("{giant}, ");
        return measure(case, Path::new(dir));
    }
    for giant in [llama(), deepseek()] {
        let dir = tempfile::tempdir().unwrap();
        giant.write(dir.path());
        for case in giant.cases() {
            let mut child = Command::new(env::current_exe().unwrap());
            let child = child.args([giant.name, case.name]).arg(dir.path());
            let status = child.status().unwrap();
            assert!(status.success(), "{status}");
        }
    }
}

fn measure(name: &str, dir: &Path) {
    let case = cases()
        .find(|case| case.name == name)
        .expect("a case by this name");
    let (start, before) = (Instant::now(), peak_kib());
    let checkpoint = Checkpoint::open(dir).unwrap();
    let (opened, opened_peak) = (start.elapsed(), peak_kib());
    let plan = plan_one(&checkpoint, &case.options);
    let (elapsed, peak) = (start.elapsed(), peak_kib());
    println!(
        "{name}: open {:.1} ms, both {:.1} ms; open {:.1} MiB, both {:.1} MiB; {} tensors of {} GB",
        opened.as_secs_f64() * 1e3,
        elapsed.as_secs_f64() * 1e3,
        (opened_peak - before) as f64 / 1024.0,
        (peak - before) as f64 / 1024.0,
        plan.ranks()[0].manifest.tensors().len(),
        plan.ranks()[0].region_bytes / 1_000_000_000,
    );
}

/// The most resident memory that this process ever had.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number.expect("Linux says it").parse().unwrap()
}
