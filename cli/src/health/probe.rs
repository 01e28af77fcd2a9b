//! Asks every daemon at its socket, with a deadline.

use super::board::{Board, Member, Notes};
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use weightd_blocking::request::request;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{Activity, DaemonStatus, GetActivity, GetStatus};

/// How long a daemon may take to answer.
const ANSWERS_WITHIN: Span = Span::secs(2);
/// For so long a result is told to whoever asks: a flood of questions costs the daemons nothing.
const HOLDS_FOR: Duration = Duration::from_millis(500);
/// The upper ends of the histogram's buckets, in seconds.
const BUCKETS: [f64; 11] = [5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 5e-2, 0.25, 1.0, 2.0];

pub type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
pub struct Prober {
    board: Board,
    /// How long each daemon took to answer.
    pub round_trips: Family<Labels, Histogram, RoundTrips>,
    /// One probe at a time; who comes meanwhile gets its result.
    last: Mutex<Option<(Instant, Arc<Probed>)>>,
}

/// What all daemons said.
#[derive(Debug)]
pub struct Probed {
    pub notes: Notes,
    /// By their numbers; none before READY, since no socket has its name.
    pub daemons: Vec<Result<Answer, String>>,
}

/// What one daemon said.
#[derive(Debug)]
pub struct Answer {
    pub status: DaemonStatus,
    /// Absent from a server of an older release.
    pub activity: Option<Activity>,
}

#[derive(Clone, Debug)]
pub struct RoundTrips;

impl MetricConstructor<Histogram> for RoundTrips {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BUCKETS)
    }
}

impl Prober {
    pub fn new(board: Board) -> Prober {
        Prober {
            board,
            round_trips: Family::new_with_constructor(RoundTrips),
            last: Mutex::new(None),
        }
    }

    /// What the daemons say now, or said a moment ago.
    pub async fn probe(&self) -> Arc<Probed> {
        let mut last = self.last.lock().await;
        if let Some((at, probed)) = &*last
            && at.elapsed() < HOLDS_FOR
        {
            return Arc::clone(probed);
        }
        let probed = Arc::new(self.ask_all().await);
        *last = Some((Instant::now(), Arc::clone(&probed)));
        probed
    }

    async fn ask_all(&self) -> Probed {
        let notes = self.board.notes();
        let mut daemons = Vec::new();
        if notes.ready {
            let asking = notes
                .daemons
                .iter()
                .cloned()
                .map(|member| spawn_blocking(move || ask(&member)));
            // All at once, before the first is waited for.
            for (asked, member) in asking.collect::<Vec<_>>().into_iter().zip(&notes.daemons) {
                let answer = asked.await.unwrap_or_else(|error| Err(error.to_string()));
                daemons.push(answer.map(|(answer, took)| {
                    let labels = labels(member);
                    self.round_trips
                        .get_or_create(&labels)
                        .observe(took.as_secs_f64());
                    answer
                }));
            }
        }
        Probed { notes, daemons }
    }
}

/// Whose a number is.
pub fn labels(member: &Member) -> Labels {
    vec![
        ("rank", member.rank.to_string()),
        ("role", member.role.to_owned()),
    ]
}

/// The answer, and how long the first question took.
fn ask(member: &Member) -> Result<(Answer, Duration), String> {
    let start = Instant::now();
    let status = match request(&member.socket, GetStatus {}, ANSWERS_WITHIN) {
        Ok(Message::DaemonStatus(status)) => status,
        Ok(other) => return Err(format!("answered with a {} message", other.name())),
        Err(error) => return Err(error.to_string()),
    };
    let took = start.elapsed();
    let activity = match request(&member.socket, GetActivity {}, ANSWERS_WITHIN) {
        Ok(Message::Activity(activity)) => Some(activity),
        _ => None,
    };
    Ok((Answer { status, activity }, took))
}
