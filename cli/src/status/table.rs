//! One line for each daemon, in columns.

use super::{Found, holds};
use weightd_core::text::short;
use weightd_core::wire::message::DaemonStatus;
use weightd_socket::path::Named;

const HEADS: [&str; 12] = [
    "DEVICE",
    "RANK",
    "ROLE",
    "MODEL",
    "LAYOUT",
    "STATE",
    "GENERATION",
    "BYTES",
    "LEASES",
    "UP",
    "SERVER",
    "LAUNCHER",
];
/// The columns with numbers, which stand to the right.
const NUMBERS: [&str; 6] = ["RANK", "BYTES", "LEASES", "UP", "SERVER", "LAUNCHER"];
/// As many of a device's digits as tell it from others; the list below has them all.
const DEVICE_DIGITS: usize = 8;
/// As much of a text as leaves room for the others.
const TEXT_BYTES: usize = 64;

/// The table, its heads first.
pub fn lines(found: &[Found]) -> Vec<String> {
    let mut rows = vec![HEADS.map(str::to_owned)];
    rows.extend(found.iter().map(row));
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..HEADS.len()).map(width).collect();
    let line = |row: &[String; 12]| {
        let cells = row.iter().zip(&widths).zip(HEADS);
        let padded = cells.map(|((cell, &width), head)| {
            if NUMBERS.contains(&head) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn row(found: &Found) -> [String; 12] {
    let none = || "-".to_owned();
    let Ok(status) = &found.status else {
        let named = Named::from_path(&found.socket);
        let device = named.as_ref().map(|named| named.device.hex());
        let role = named.map_or("-", |named| named.role.name());
        let mut row = std::array::from_fn(|_| none());
        row[0] = device.map_or_else(none, |device| digits(&device));
        row[2] = role.to_owned();
        row[5] = found.state.to_owned();
        row[10] = found.living.server.map_or_else(none, |pid| pid.to_string());
        row[11] = found.living.launcher.map_or_else(none, |pid| pid.to_string());
        return row;
    };
    let DaemonStatus { info, .. } = status;
    let (state, generation) = holds(status);
    let launcher = match status.launcher_pid {
        0 => "none".to_owned(),
        pid => pid.to_string(),
    };
    [
        digits(&info.device_uuid.hex()),
        info.global_rank.to_string(),
        info.key.role.name().to_owned(),
        shown(&info.key.model_arch),
        shown(&info.key.layout),
        state.to_owned(),
        generation.unwrap_or_else(none),
        size(status.bytes),
        status.leases.to_string(),
        duration(status.uptime_s),
        status.pid.to_string(),
        launcher,
    ]
}

/// What a publisher says, on one line; and what nobody has said yet of a daemon that waits for one.
pub fn shown(text: &str) -> String {
    match text {
        "" => "-".to_owned(),
        _ => short(text, TEXT_BYTES),
    }
}

fn digits(device: &str) -> String {
    device.chars().take(DEVICE_DIGITS).collect()
}

/// Bytes for a person, in the units of nvidia-smi.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.2} {}", units[unit]),
    }
}

/// Seconds for a person.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owners::Living;

    #[test]
    fn sizes_and_times_are_short() {
        let sizes = [0, 1023, 1024, 16_060_522_496, u64::MAX].map(size);
        assert_eq!(
            sizes,
            ["0 B", "1023 B", "1.00 KiB", "14.96 GiB", "16777216.00 TiB"]
        );
        let times = [0, 59, 61, 3600, 90_000].map(duration);
        assert_eq!(times, ["0s", "59s", "1m01s", "1h00m", "1d01h"]);
    }

    #[test]
    fn what_publishers_say_stays_in_its_column() {
        assert_eq!(shown(""), "-");
        assert_eq!(shown("Llama\n\u{1b}[2J"), r"Llama\n\u{1b}[2J");
        assert_eq!(shown(&"ß".repeat(100)), "ß".repeat(30) + "...");
    }

    #[test]
    fn columns_stand_under_their_heads() {
        let found = Found {
            socket: "/x/weightd_00112233445566778899aabbccddeeff_draft.sock".into(),
            status: Err("no answer".to_owned()),
            activity: None,
            state: "no answer",
            living: Living::default(),
        };
        let lines = lines(&[found]);
        let at = |line: &str, what: &str| line.find(what).unwrap_or_else(|| panic!("{what} in {line:?}"));
        assert_eq!(at(&lines[0], "DEVICE"), at(&lines[1], "00112233 "));
        assert_eq!(at(&lines[0], "ROLE"), at(&lines[1], "draft"));
        assert_eq!(at(&lines[0], "STATE"), at(&lines[1], "no answer"));
    }
}
