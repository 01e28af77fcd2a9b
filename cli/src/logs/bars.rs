//! A progress bar for each daemon that loads, on a terminal.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::collections::BTreeMap;

const TEMPLATE: &str =
    "{prefix:>14} [{bar:32}] {bytes:>11} of {total_bytes:>11}, {bytes_per_sec}, {eta} left";

/// Used by one thread alone, the one that writes lines too.
#[derive(Default)]
pub struct Bars {
    all: MultiProgress,
    bars: BTreeMap<String, ProgressBar>,
}

impl Bars {
    /// Shows a daemon's bar, until all is there.
    pub fn show(&mut self, name: &str, done: u64, total: u64) {
        if done >= total {
            if let Some(bar) = self.bars.remove(name) {
                bar.finish_and_clear();
                self.all.remove(&bar);
            }
            return;
        }
        let bar = self.bars.entry(name.to_owned()).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(total));
            let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
            bar.set_style(style.progress_chars("=> "));
            bar.set_prefix(name.to_owned());
            bar
        });
        bar.set_position(done);
    }

    /// Writes something above the bars.
    pub fn above<T>(&self, write: impl FnOnce() -> T) -> T {
        if self.bars.is_empty() {
            return write();
        }
        self.all.suspend(write)
    }

    /// Takes all bars away.
    pub fn clear(&mut self) {
        for bar in std::mem::take(&mut self.bars).into_values() {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
    }
}
