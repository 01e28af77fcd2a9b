//! What of a key is the daemon's, and what its publisher's.

use super::*;

#[test]
fn a_key_of_another_place_is_a_conflict_that_names_it_and_everything_else_is_the_publishers() {
    type Change = (&'static str, fn(&mut Key));
    let changes: [Change; 7] = [
        ("tp_size", |key| key.tp_size = 4),
        ("tp_rank", |key| key.tp_rank = 1),
        ("pp_size", |key| key.pp_size = 2),
        ("pp_rank", |key| key.pp_rank = 1),
        ("role", |key| key.role = Role::Draft),
        ("dp_size", |key| key.dp_size = 2),
        ("dp_rank", |key| key.dp_rank = 1),
    ];
    for mut world in [waiting(), published()] {
        let holds = status(&mut world, 0).holds;
        let expects = match holds {
            Holds::Content(current) => Expects::Generation(current),
            _ => Expects::Empty,
        };
        for (field, change) in changes {
            let mut wrong = publication(0, expects, content(64, &[5]));
            change(&mut wrong.key);
            // What is the publisher's to say does not count.
            wrong.key.dtype = "float16".into();
            let raw = world.raw(0);
            let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
            world.say(raw, wrong, descriptors);
            world.run();
            let (code, retryable, why) = failure(&mut world, raw);
            assert_eq!((code, retryable), (ErrorCode::Conflict, false));
            assert!(why.contains(&format!("in {field} (asked for ")), "{why}");
        }
        assert_eq!(status(&mut world, 0).holds, holds);
        let mut right = publication(0, expects, content(64, &[5]));
        right.key.dtype = "float16".into();
        right.key.processing = "marlin".into();
        right.key.enable_expert_parallel = true;
        let mine = right.key.clone();
        let raw = world.raw(0);
        let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
        world.say(raw, right, descriptors);
        world.run();
        assert!(answer(&mut world, raw).is_ok());
        assert_eq!(
            mismatch(&mut world, 0, key(0)),
            ["dtype", "enable_expert_parallel", "processing"],
            "an engine of the key before is told what is new"
        );
        assert!(matches!(get_state(&mut world, 0, mine), Message::State(_)));
        world.finish();
    }
}

#[test]
fn a_checkpoint_is_the_same_by_its_files_or_by_the_digest_that_its_publisher_said() {
    let mut world = published();
    let mut elsewhere = key(0);
    elsewhere.checkpoint.files = Some([2; 32]);
    assert_eq!(
        mismatch(&mut world, 0, elsewhere.clone()),
        ["checkpoint"],
        "nobody will ever know the digest"
    );
    let mut said = publication(0, Expects::Generation(generation(1)), content(64, &[5]));
    said.key.checkpoint.digest = Some([9; 32]);
    let raw = world.raw(0);
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
    world.say(raw, said, descriptors);
    world.run();
    assert_eq!(answer(&mut world, raw), Ok(generation(3)));
    assert!(matches!(
        get_state(&mut world, 0, elsewhere.clone()),
        Message::NeedDigest(_)
    ));
    elsewhere.checkpoint.digest = Some([9; 32]);
    assert!(matches!(
        get_state(&mut world, 0, elsewhere.clone()),
        Message::State(_)
    ));
    // What is known of the same files stays known.
    publish(&mut world, 0, 6, Expects::Generation(generation(3)))
        .1
        .unwrap();
    assert!(matches!(get_state(&mut world, 0, elsewhere), Message::State(_)));
    world.finish();
}
