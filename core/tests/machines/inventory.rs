//! Copies of what a vault holds, and what is made of them.

use crate::ledger::Fd;
use crate::world::*;
use proptest::prelude::*;
use weightd_core::content::{Comparison, Generation};
use weightd_core::machine::{
    AttachOptions, InheritError, Inheritance, Outcome, Vault, VaultEvent, inventory_names,
};
use weightd_core::peer::Facts;
use weightd_core::wire::message::{Adopted, Control, Define, Expects, Holds, Message, Publish, Released};
use weightd_core::wire::{HEADER_BYTES, Header};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

#[test]
fn what_a_server_says_that_is_no_inheritance_is_refused() {
    let define = |daemon| Define {
        daemon,
        info: info(daemon, false),
        holds: Holds::Content(generation(1)),
    };
    let publish = |daemon, number| Publish {
        generation: Some(generation(number)),
        ..publication(daemon, Expects::Empty, content(64, &[10]))
    };
    type Says = Vec<(Message, &'static str)>;
    let cases: Vec<(Says, &str)> = vec![
        (
            vec![(Adopted { pid: 1 }.into(), "")],
            "Adopted message is out of place",
        ),
        (vec![(define(1).into(), "kl")], "Define message is out of place"),
        (vec![(define(0).into(), "lk")], "instead of a lock and a listener"),
        (vec![(define(0).into(), "k")], "instead of a lock and a listener"),
        (
            vec![(define(0).into(), "kl"), (Adopted { pid: 1 }.into(), "")],
            "was announced and did not come",
        ),
        (
            vec![(define(0).into(), "kl"), (publish(1, 1).into(), "mr")],
            "Publish message is out of place",
        ),
        (
            vec![(define(0).into(), "kl"), (publish(0, 2).into(), "mr")],
            "Publish message is out of place",
        ),
        (
            vec![(define(0).into(), "kl"), (publish(0, 1).into(), "mm")],
            "daemon 0: region 0's descriptor",
        ),
        (
            vec![(define(0).into(), "kl"), (publish(0, 1).into(), "m")],
            "1 descriptors came",
        ),
        (
            vec![
                (Control { names_stay: false }.into(), "kl"),
                (Control { names_stay: false }.into(), "kl"),
            ],
            "Control message is out of place",
        ),
        (vec![(Released {}.into(), "")], "Released message is out of place"),
    ];
    for (says, expected) in cases {
        let world = World::new();
        let ledger = &world.ledger;
        let mut description = Vec::new();
        let mut descriptors: Vec<(Facts, Fd)> = Vec::new();
        for (message, kinds) in &says {
            description.extend(frame(message, 0, kinds.len()));
            descriptors.extend(kinds.chars().map(|kind| {
                let fd = match kind {
                    'k' => ledger.lock(),
                    'l' => ledger.listener(),
                    'm' => ledger.memory(64),
                    _ => ledger.memory(10),
                };
                (fd.facts, fd)
            }));
        }
        let error = Inheritance::from_inventory(&description, descriptors)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_vault_goes_on_with_copies_of_what_another_held() {
    let mut world = World::ready();
    world.release(0);
    let vault = &world.vault.as_ref().unwrap().machine;
    let inventory = vault.inventory();
    let names: Vec<String> = inventory
        .descriptors
        .iter()
        .map(|(name, _)| name.clone())
        .collect();
    let expected = [
        "daemon0-lock",
        "daemon0-listener",
        "daemon1-lock",
        "daemon1-listener",
        "content000000000000000e-2-0",
        "content000000000000000e-2-1",
    ];
    assert_eq!(names, expected);
    assert_eq!(inventory_names(&inventory.description).unwrap(), names);
    let description = inventory.description.clone();
    let copies: Vec<(Facts, Fd)> = inventory
        .descriptors
        .iter()
        .map(|(_, fd)| (fd.facts, fd.duplicate()))
        .collect();
    world.kill_server();
    world.kill_vault();
    world.kill_loader();
    let inheritance = Inheritance::from_inventory(&description, copies).unwrap();
    assert_eq!(
        inheritance.compare(&[info(0, false), info(1, false)]),
        Comparison::Same
    );
    assert!(inheritance.server.is_none() && inheritance.control.is_none());
    let holds: Vec<Holds> = inheritance.daemons.iter().map(|daemon| daemon.holds()).collect();
    assert_eq!(
        holds,
        [Holds::Released(generation(1)), Holds::Content(generation(2))]
    );
    // It connects before there is a server: its listener lives.
    let engine = world.attach(1, AttachOptions::new(UID), key(1));
    world.run();
    world.vault = Some(crate::host::Host::new(Vault::inheriting(11, 0xF, inheritance)));
    world.start_server();
    world.run();
    let mapped = Outcome::Mapped {
        generation: generation(2),
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    assert_eq!(
        world.vault.as_ref().unwrap().events,
        [VaultEvent::Armed { complete: true }]
    );
    world.finish();
}

#[test]
fn a_release_is_answered_when_no_copy_is_kept_elsewhere() {
    let mut world = World::ready();
    let vault = world.vault.as_mut().unwrap();
    let before = vault.machine.revision();
    vault.input(|vault| vault.kept_elsewhere(before));
    let raw = world.release(0);
    assert!(world.heard(raw).is_empty(), "a copy is still kept");
    let vault = world.vault.as_mut().unwrap();
    let after = vault.machine.revision();
    assert!(after > before);
    let named = |vault: &Vault<Fd>| {
        vault
            .inventory()
            .descriptors
            .iter()
            .any(|(name, _)| name.contains("-1-"))
    };
    assert!(!named(&vault.machine));
    vault.input(|vault| vault.kept_elsewhere(after));
    world.run();
    assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    // Without copies, and for content that was not there when they were made, nothing is waited for.
    world.publish(0, 3, Expects::Empty);
    world.run();
    let vault = world.vault.as_mut().unwrap();
    let revision = vault.machine.revision();
    vault.input(|vault| vault.kept_elsewhere(revision + 100));
    world.say_release(raw, 0);
    assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    world.finish();
}

proptest! {
    #[test]
    fn a_description_that_was_changed_is_refused_or_means_something_else_and_never_panics(
        at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(), cuts in any::<bool>(),
    ) {
        let world = World::ready();
        let inventory = world.vault.as_ref().unwrap().machine.inventory();
        let mut description = inventory.description.clone();
        let at = at.index(description.len());
        description[at] = byte;
        if cuts {
            let to = cut.index(description.len());
            description.truncate(to);
        }
        if let Ok(names) = inventory_names(&description) {
            let copies = names.iter().filter_map(|name| {
                let found = inventory.descriptors.iter().find(|(known, _)| known == name);
                found.map(|(_, fd)| (fd.facts, fd.duplicate()))
            });
            let copies: Vec<(Facts, Fd)> = copies.collect();
            let read = Inheritance::from_inventory(&description, copies);
            // A cut that falls between two frames is noticed too.
            prop_assert!(!cuts || read.is_err());
        }
    }

    #[test]
    fn garbage_is_no_description(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in any::<u16>()) {
        let header = Header { kind, request: 0, body: bytes.len(), descriptors: 0 };
        let framed = [header.encode().to_vec(), bytes.clone()].concat();
        prop_assert_eq!(framed.len(), HEADER_BYTES + bytes.len());
        for description in [bytes, framed] {
            let read: Result<Inheritance<Fd>, InheritError> = Inheritance::from_inventory(&description, []);
            prop_assert!(read.is_err());
            let _ = inventory_names(&description);
        }
    }
}
