//! `/health` and `/metrics` as a client without a library reads them.

use crate::harness::*;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Where a launcher answers, by what it logged.
#[track_caller]
pub fn address(launcher: &Running) -> String {
    let mut found = None;
    wait_until("the health port is logged", || {
        let log = launcher.log();
        let start = log
            .find("health on http://")
            .map(|at| at + "health on http://".len());
        found = start.and_then(|at| Some(log[at..].split_once('/')?.0.to_owned()));
        found.is_some()
    });
    found.unwrap()
}

/// The status code and the body of an answer.
#[track_caller]
pub fn get(address: &str, path: &str) -> (u16, String) {
    ask("GET", address, path)
}

/// The same of a request without a body that changes something.
#[track_caller]
pub fn post(address: &str, path: &str) -> (u16, String) {
    ask("POST", address, path)
}

#[track_caller]
fn ask(method: &str, address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, body.to_owned())
}

/// `/health`: its code and its JSON.
#[track_caller]
pub fn health(address: &str) -> (u16, Value) {
    let (code, body) = get(address, "/health");
    (code, serde_json::from_str(&body).unwrap())
}

/// One sample of a metric: its labels in order, and its value.
pub type Sample = (Vec<(String, String)>, f64);

/// `/metrics`, read as the format has it; fails where a line is not of it, or was not announced.
#[track_caller]
pub fn metrics(address: &str) -> Metrics {
    let (code, text) = get(address, "/metrics");
    assert_eq!(code, 200);
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut types: Vec<&str> = Vec::new();
    let mut samples = Vec::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            if let Some(announced) = comment.strip_prefix("TYPE ") {
                types.push(announced.split(' ').next().unwrap());
            }
            continue;
        }
        let (name_and_labels, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = name_and_labels.split_once('{').unwrap_or((name_and_labels, "}"));
        assert!(
            types.iter().any(|known| name.starts_with(known)),
            "{name} has no TYPE"
        );
        let labels = labels
            .strip_suffix('}')
            .unwrap()
            .split(',')
            .filter(|label| !label.is_empty());
        let mut labels: Vec<(String, String)> = labels
            .map(|label| {
                let (name, value) = label.split_once('=').unwrap();
                let value = value
                    .strip_prefix('"')
                    .and_then(|value| value.strip_suffix('"'))
                    .unwrap();
                (name.to_owned(), value.to_owned())
            })
            .collect();
        labels.sort();
        samples.push((name.to_owned(), (labels, value.parse().unwrap())));
    }
    Metrics { samples }
}

pub struct Metrics {
    samples: Vec<(String, Sample)>,
}

impl Metrics {
    /// All samples of a name.
    pub fn all(&self, name: &str) -> Vec<&Sample> {
        let named = self.samples.iter().filter(|(found, _)| found == name);
        named.map(|(_, sample)| sample).collect()
    }

    /// The one sample with these labels among others; `None` where there is none.
    pub fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let fits = |sample: &&Sample| {
            let has =
                |(name, value): &(&str, &str)| sample.0.contains(&((*name).to_owned(), (*value).to_owned()));
            labels.iter().all(has)
        };
        let found: Vec<_> = self.all(name).into_iter().filter(fits).collect();
        assert!(found.len() <= 1, "{name} {labels:?}: {found:?}");
        found.first().map(|(_, value)| *value)
    }

    /// The value of the one sample with these labels.
    #[track_caller]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels)
            .unwrap_or_else(|| panic!("no {name} {labels:?} in {:?}", self.all(name)))
    }
}
