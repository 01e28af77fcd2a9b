//! What others say in words is shown to people and written to logs, by this crate's users as by weightd.

use crate::ledger::Fd;
use crate::scripted::{self, Act};
use crate::world::{EPOCH, UID, World, content, frame, key, publication};
use std::fmt::Display;
use weightd_core::content::Generation;
use weightd_core::machine::{
    Adopt, Attach, AttachOptions, AttachStep, Exchange, Handover, HandoverEvent, Origin, Publish,
    PublishStep, Query, ServerEvent, VaultEvent,
};
use weightd_core::peer::Peer;
use weightd_core::text::is_hidden;
use weightd_core::time::{Now, Span};
use weightd_core::wire::message::{ErrorCode, Expects, Failure, GetStatus, LoadFailed, Message, Report};

/// As much as a message carries, and nothing that anybody wants on a terminal.
fn words() -> String {
    "\u{1b}[2J\u{9b}31m\u{202e}\nERROR forged".to_owned() + &"x".repeat(60_000)
}

fn failure(code: ErrorCode) -> Failure {
    Failure {
        code: code.number(),
        retryable: false,
        message: words(),
    }
}

#[track_caller]
fn assert_harmless(shown: impl Display) {
    let shown = shown.to_string();
    assert!(
        !shown.contains(is_hidden) && shown.contains(r"\u{1b}[2J\u{9b}31m\u{202e}\nERROR forged"),
        "{shown:?}"
    );
    assert!(shown.len() < 4200, "{} bytes", shown.len());
}

#[test]
fn a_daemons_words_reach_an_engine_on_one_short_line() {
    let options = AttachOptions::new(UID);
    for code in [
        ErrorCode::Empty,
        ErrorCode::RefusedPeer,
        ErrorCode::Malformed,
        ErrorCode::UnknownCommand,
        ErrorCode::Conflict,
        ErrorCode::InDoubt,
    ] {
        let daemon = |_: Option<&Message>, _| Act::Says(failure(code).into());
        let attach: Attach<Fd> = Attach::new(options.clone(), key(0));
        let attached = scripted::drive(attach, daemon, |_, _, step, _| Some(step));
        let AttachStep::LoadFromDisk { because } = attached.end else {
            panic!("{:?}", attached.end)
        };
        assert_harmless(because);
        let query: Query<Fd> = Query::new(&options, GetStatus {});
        let asked = scripted::drive(query, daemon, |_, _, answer, _| Some(answer));
        assert_harmless(asked.end.unwrap_err());
        let publish: Publish<Fd> = Publish::new(&options, key(0));
        let published = scripted::drive(publish, daemon, |_, _, step, _| Some(step));
        let PublishStep::Done(Err(error)) = published.end else {
            panic!("{:?}", published.end)
        };
        assert_harmless(error);
    }
}

#[test]
fn a_servers_words_reach_a_launcher_that_adopts_on_one_short_line() {
    let mut adopt: Adopt<Fd> = Adopt::new(Now(0), 1, Peer { pid: 2, uid: UID }, UID, Span::secs(1));
    let bytes = frame(&failure(ErrorCode::Busy).into(), 1, 0);
    adopt.receive(Now(0), &bytes, [], false);
    assert_harmless(adopt.finish().unwrap_err());
}

#[test]
fn a_launchers_words_reach_its_loader_on_one_short_line() {
    for request in [0, 1] {
        let mut loader: Handover<Fd> = Handover::default();
        loader.publish(publication(0, Expects::Empty, content(64, &[])), vec![]);
        let bytes = frame(&failure(ErrorCode::Conflict).into(), request, 0);
        loader.receive(Now(0), &bytes, [], false);
        match loader.poll() {
            Some(HandoverEvent::Refused { why, .. } | HandoverEvent::Gone { why }) => assert_harmless(why),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_words_of_engines_loaders_and_servers_are_told_on_one_short_line() {
    let mut world = World::ready();
    let report = Report {
        daemon: 0,
        generation: Generation {
            epoch: EPOCH,
            number: 1,
        },
        import_failed: words(),
    };
    let engine = world.raw(0);
    world.say(engine, report, vec![]);
    let loader = world.raw_as(Origin::Loader, Peer { pid: 30, uid: UID });
    world.say(loader, LoadFailed { message: words() }, vec![]);
    world.run();
    let server = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    world.say(server, failure(ErrorCode::Internal), vec![]);
    world.run();
    let server = world.server.as_ref().unwrap().events.iter();
    let in_server = server.filter_map(|event| match event {
        ServerEvent::ImportFailed { why, .. } => Some(why),
        _ => None,
    });
    let vault = world.vault.as_ref().unwrap().events.iter();
    let in_vault = vault.filter_map(|event| match event {
        VaultEvent::ImportFailed { why, .. }
        | VaultEvent::LoadFailed { why }
        | VaultEvent::ServerGone { why } => Some(why),
        _ => None,
    });
    let told: Vec<&String> = in_server
        .chain(in_vault)
        .filter(|why| why.contains("forged"))
        .collect();
    assert_eq!(told.len(), 4, "{told:?}");
    told.into_iter().for_each(assert_harmless);
    world.finish();
}
