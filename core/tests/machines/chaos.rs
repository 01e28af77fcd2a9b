//! Seeds and sequences of operations: whatever happens, descriptors are kept, generations mean
//! what they say, and whoever asks is answered.

use crate::socket::Dice;
use crate::world::*;
use proptest::prelude::*;
use weightd_core::fuzz::pair::{Operation, live_through};
use weightd_core::machine::{AttachOptions, Outcome};
use weightd_core::time::Span;

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        4 => (0..3_u32, any::<bool>(), any::<bool>(), 0..15_000_u64)
            .prop_map(|(daemon, copy, fallback, works)| Attach { daemon, copy, fallback, works }),
        2 => any::<usize>().prop_map(EndEngine),
        3 => (0..2_u32, 1..5000_u64, any::<bool>())
            .prop_map(|(daemon, bytes, stale)| Publish { daemon, bytes, stale }),
        2 => (1..5000_u64, any::<bool>()).prop_map(|(bytes, fails)| SendPublisher { bytes, fails }),
        1 => (0..3_u32, any::<bool>()).prop_map(|(daemon, any)| Release { daemon, any }),
        2 => (0..20_000_u64).prop_map(|after| RestartServer { after }),
        2 => (0..60_usize).prop_map(|dies_after| Adopt { dies_after }),
        3 => (0..2_u32, 0..400_usize, any::<bool>()).prop_map(|(daemon, cut, deaf)| Raw { daemon, cut, deaf }),
        2 => any::<usize>().prop_map(HangUp),
        1 => any::<bool>().prop_map(HoldReaper),
        1 => (0..12_usize).prop_map(Turns),
        3 => (0..8_000_u64).prop_map(Pass),
        1 => prop_oneof![Just(5), Just(36), Just(200_000)].prop_map(Narrow),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_descriptors_are_kept_and_everyone_is_answered(
        seed in any::<u64>(),
        operations in proptest::collection::vec(operation(), 1..25),
    ) {
        live_through(seed, operations);
    }

    #[test]
    fn an_attach_comes_through_any_splitting_and_merging(seed in any::<u64>(), capacity in 1..500_usize) {
        let mut world = World::new();
        world.dice = Some(Dice(seed));
        world.capacity = capacity;
        world.start_vault(false);
        world.start_server();
        world.load();
        let engines: Vec<usize> =
            (0..4).map(|number| world.attach(number % 2, AttachOptions::new(UID), key(number % 2))).collect();
        let patient = AttachOptions { fallback: false, ..AttachOptions::new(UID) };
        let late = world.attach(0, patient, key(0));
        world.pass(Span::secs(10));
        let served = matches!(world.engines[late].end, Some(End::Done(Outcome::Mapped { leased: true, .. })));
        prop_assert!(served);
        let ended = engines.iter().all(|engine| world.engines[*engine].end.is_some());
        prop_assert!(ended);
        world.finish();
    }
}
