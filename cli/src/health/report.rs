//! `/health`: whether every daemon answers and holds content, and if not, which does not and why. Those that
//! wait for publishers need only answer: whoever watches this launcher could bring nothing back by ending it.

use super::probe::{Answer, Probed};
use serde_json::{Value, json};
use weightd_core::wire::message::{DaemonInfo, Holds};

/// True where all is well, with the same in JSON.
pub fn report(probed: &Probed) -> (bool, Value) {
    let mut all_well = probed.notes.ready;
    let daemons = probed.notes.daemons.iter().enumerate().map(|(number, member)| {
        let (state, why) = match probed.daemons.get(number) {
            None => ("loading", Some("its weights are being loaded".to_owned())),
            Some(Err(why)) => ("unreachable", Some(why.clone())),
            Some(Ok(Answer { status, .. })) => {
                let (state, why) = state(&status.info, &status.holds);
                all_well &= why.is_none() || status.info.publish.is_some();
                (state, why)
            }
        };
        all_well &= !matches!(state, "loading" | "unreachable");
        json!({
            "rank": member.rank,
            "role": member.role,
            "socket": member.socket,
            "state": state,
            "why": why,
        })
    });
    let daemons: Vec<Value> = daemons.collect();
    let status = match (all_well, probed.notes.ready) {
        (true, _) => "ok",
        (false, true) => "unavailable",
        (false, false) => "starting",
    };
    (all_well, json!({ "status": status, "daemons": daemons }))
}

/// What it holds; and why that is nothing.
fn state(info: &DaemonInfo, holds: &Holds) -> (&'static str, Option<String>) {
    let waits = info.publish.is_some();
    match holds {
        Holds::Content(_) => ("serving", None),
        Holds::Empty if waits => ("empty", Some("nothing was published yet".to_owned())),
        Holds::Empty => ("empty", Some("it holds no content".to_owned())),
        Holds::Released(generation) => ("released", Some(format!("generation {generation} was released"))),
        Holds::Lost(generation) => {
            let then = if waits {
                "and nobody has published since"
            } else {
                "which is being loaded afresh"
            };
            (
                "lost",
                Some(format!("the device lost generation {generation}, {then}")),
            )
        }
    }
}
