//! What the disk gives without a loader: reads every file of a directory once, in chunks, into buffers
//! that are reused. `plain_read DIR buffered|direct WORKERS CHUNK_KIB`, or `plain_read DIR evict` to
//! take the files out of the page cache, which works for what is not dirty and not mapped.

use rustix::fs::{Advice, Mode, OFlags};
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

const PAGE: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let (dir, flags, rest) = match words[..] {
        [dir, "evict"] => return evict(&files(dir)?),
        [dir, "buffered", ref rest @ ..] => (dir, OFlags::empty(), rest),
        [dir, "direct", ref rest @ ..] => (dir, OFlags::DIRECT, rest),
        _ => return Err("usage: plain_read DIR evict|buffered|direct [WORKERS CHUNK_KIB]".into()),
    };
    let &[workers, chunk_kib] = rest else {
        return Err("how many workers, and chunks of how many KiB?".into());
    };
    let (workers, chunk) = (workers.parse::<usize>()?, chunk_kib.parse::<usize>()? << 10);
    let mut chunks = Vec::new();
    let mut bytes = 0;
    for path in files(dir)? {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty())?;
        let file = std::sync::Arc::new(File::from(fd));
        let size = file.metadata()?.len();
        bytes += size;
        chunks.extend((0..size).step_by(chunk).map(|offset| (file.clone(), offset)));
    }
    let next = AtomicUsize::new(0);
    let read = || -> std::io::Result<()> {
        let mut memory = vec![0; chunk + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let buffer = &mut memory[start..start + chunk];
        while let Some((file, offset)) = chunks.get(next.fetch_add(1, Relaxed)) {
            // Short at the end of a file, and nowhere else on a local file system.
            file.read_at(buffer, *offset)?;
        }
        Ok(())
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(read)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("reads do not panic"))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let gb = bytes as f64 / 1e9;
    println!(
        "plain {} workers {workers} chunk {chunk_kib} KiB: {gb:.2} GB in {seconds:.3} s, {:.2} GB/s",
        words[1],
        gb / seconds
    );
    Ok(())
}

fn files(dir: &str) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn evict(files: &[PathBuf]) -> Result<(), Box<dyn Error>> {
    for path in files {
        let file = File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}
