//! `/metrics`, in the text format of OpenMetrics, which Prometheus reads.

use super::probe::{Answer, Labels, Probed, RoundTrips, labels};
use crate::logs::lost_lines;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use weightd_core::wire::message::{ErrorCode, Holds};

pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Count = Family<Labels, Counter>;
type Whole = Family<Labels, Gauge>;
type Real = Family<Labels, Gauge<f64, AtomicU64>>;

/// What is said of what was probed. Numbers that servers count begin at 0 with each server, as Prometheus
/// expects of counters.
pub fn metrics(probed: &Probed, round_trips: &Family<Labels, Histogram, RoundTrips>) -> String {
    let mut page = Page::default();
    for (number, member) in probed.notes.daemons.iter().enumerate() {
        let labels = labels(member);
        let answer = probed.daemons.get(number).and_then(|answer| answer.as_ref().ok());
        page.up.get_or_create(&labels).set(i64::from(answer.is_some()));
        if let Some(answer) = answer {
            page.daemon(&labels, answer);
        }
        if let Some(load) = probed.notes.loads.get(&(number as u32)) {
            page.load_seconds
                .get_or_create(&labels)
                .set(load.micros as f64 / 1e6);
            for (path, bytes) in [("page_cache", load.buffered), ("direct", load.direct)] {
                let by_path = with(&labels, "path", path);
                page.load_bytes.get_or_create(&by_path).set(whole(bytes));
            }
        }
    }
    page.ready.set(i64::from(probed.notes.ready));
    page.rearms.inc_by(probed.notes.rearms);
    page.server_restarts.inc_by(probed.notes.server_restarts);
    page.lost_lines.inc_by(lost_lines());
    page.text(round_trips)
}

/// The numbers of one answer.
#[derive(Default)]
struct Page {
    up: Whole,
    ready: Gauge,
    content_bytes: Whole,
    tensors: Whole,
    leases: Whole,
    leased_bytes: Whole,
    generation: Whole,
    attaches: Count,
    refusals: Count,
    mismatches: Count,
    rearms: Counter,
    server_restarts: Counter,
    load_seconds: Real,
    load_bytes: Whole,
    lost_lines: Counter,
}

impl Page {
    fn daemon(&mut self, labels: &Labels, Answer { status, activity }: &Answer) {
        self.content_bytes.get_or_create(labels).set(whole(status.bytes));
        self.tensors.get_or_create(labels).set(i64::from(status.tensors));
        self.leases.get_or_create(labels).set(i64::from(status.leases));
        if let Holds::Content(generation) = status.holds {
            let by_generation = with(labels, "generation", &generation.to_string());
            self.generation.get_or_create(&by_generation).set(1);
        }
        let attaches = |outcome: &str, count: u64| {
            let by_outcome = with(labels, "outcome", outcome);
            self.attaches.get_or_create(&by_outcome).inc_by(count);
        };
        attaches("sent", status.served);
        let Some(activity) = activity else { return };
        let leased = activity.generations.iter().map(|leased| leased.bytes);
        self.leased_bytes.get_or_create(labels).set(whole(leased.sum()));
        attaches("mismatch", activity.mismatches);
        attaches("need_digest", activity.need_digest);
        for refused in &activity.refused {
            let code = ErrorCode::from_number(refused.code);
            // These answer nothing but a request for content.
            match outcome(code) {
                Some(outcome) => attaches(outcome, refused.count),
                None => {
                    let by_code = with(labels, "error", &error_name(code));
                    self.refusals.get_or_create(&by_code).inc_by(refused.count);
                }
            }
        }
        for differed in &activity.mismatched {
            let by_field = with(labels, "field", &differed.field);
            self.mismatches.get_or_create(&by_field).inc_by(differed.count);
        }
    }

    fn text(self, round_trips: &Family<Labels, Histogram, RoundTrips>) -> String {
        let mut registry = Registry::with_prefix("weightd");
        let build = Whole::default();
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        build.get_or_create(&version).set(1);
        registry.register("build_info", "The version of the launcher", build);
        registry.register(
            "ready",
            "Whether all daemons of this launcher have served",
            self.ready,
        );
        registry.register("up", "Whether the daemon answered just now", self.up);
        registry.register(
            "content_bytes",
            "Bytes of the content that is served",
            self.content_bytes,
        );
        registry.register(
            "tensors",
            "Tensors that are served, aliases not counted",
            self.tensors,
        );
        registry.register("leases", "Open leases, also of earlier generations", self.leases);
        registry.register(
            "leased_bytes",
            "Bytes of all generations with open leases",
            self.leased_bytes,
        );
        registry.register(
            "generation_info",
            "The generation that is served",
            self.generation,
        );
        registry.register(
            "attaches",
            "Requests for content, by outcome, of this server",
            self.attaches,
        );
        registry.register(
            "mismatches",
            "Requests in which this field of the key differed",
            self.mismatches,
        );
        registry.register(
            "refusals",
            "Other requests and connections that failed",
            self.refusals,
        );
        registry.register(
            "rearms",
            "Servers that were armed with what the launcher holds",
            self.rearms,
        );
        registry.register(
            "server_restarts",
            "Times a server was gone and another was to take its place",
            self.server_restarts,
        );
        registry.register("load_seconds", "How long the last load took", self.load_seconds);
        registry.register(
            "load_bytes",
            "Bytes read from files by the last load, once for all daemons that it loaded for",
            self.load_bytes,
        );
        registry.register(
            "request_seconds",
            "How long the daemon took to be connected to and to answer",
            round_trips.clone(),
        );
        registry.register(
            "log_lines_lost",
            "Log lines that stderr did not take",
            self.lost_lines,
        );
        let mut text = String::new();
        encode(&mut text, &registry).expect("a string takes all that is written");
        text
    }
}

fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.to_owned()));
    labels
}

/// As far as a gauge counts.
fn whole(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// How a request for content ended that got this failure.
fn outcome(code: ErrorCode) -> Option<&'static str> {
    match code {
        ErrorCode::Empty => Some("empty"),
        ErrorCode::Released => Some("released"),
        ErrorCode::Lost => Some("lost"),
        ErrorCode::DigestPending => Some("digest_pending"),
        _ => None,
    }
}

/// The name of a cause, in lower case with underscores.
fn error_name(code: ErrorCode) -> String {
    if let ErrorCode::Unknown(number) = code {
        return format!("unknown_{number}");
    }
    let mut name = String::new();
    for character in format!("{code:?}").chars() {
        if character.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(character.to_lowercase());
    }
    name
}
