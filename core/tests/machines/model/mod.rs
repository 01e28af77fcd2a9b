//! A model of a node, and the machines beside it: whatever is asked, in any order, and whoever dies meanwhile, the
//! machines do what the model says.
//!
//! The model ([`reference`]) knows of each daemon what it has, and of each client what it holds. What is asked at
//! once may go in any order. What somebody's death interrupts may have been done or not, which is looked at
//! when all is quiet again; from then on the model is exact again, to the number of each generation.

mod asking;
mod clients;
mod deaths;
mod node;
mod quiet;
mod reference;
mod transition;

use node::Node;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngSeed, TestError, TestRunner};
use std::fmt;
use transition::{Transition, transition};

#[derive(Clone)]
struct Case {
    /// Whether both checkpoints are loaded first.
    loaded: bool,
    /// Of a kernel that is late, and moves bytes in pieces.
    dice: Option<u64>,
    transitions: Vec<Transition>,
}

fn case() -> impl Strategy<Value = Case> {
    let transitions = vec(transition(), 1..24);
    (any::<bool>(), any::<Option<u64>>(), transitions).prop_map(|(loaded, dice, transitions)| Case {
        loaded,
        dice,
        transitions,
    })
}

/// One transition a line.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "    loaded: {}, dice: {:?}", self.loaded, self.dice)?;
        self.transitions
            .iter()
            .try_for_each(|transition| write!(f, "\n    {transition:?}"))
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How many, where PROPTEST_CASES does not ask for more.
const CASES: u32 = 400;

#[test]
fn the_machines_do_what_the_model_says_whoever_dies_meanwhile() {
    let config = Config::default();
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => {
            let any_seed = any::<u64>().new_tree(&mut TestRunner::default());
            any_seed.expect("any number will do").current()
        }
    };
    let cases = config.cases.max(CASES);
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        source_file: Some(file!()),
        ..config
    };
    let outcome = TestRunner::new(config).run(&case(), |case| {
        live_through(&case);
        Ok(())
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(why, case)) => panic!(
            "{why}\n\nin the smallest case that was found:\n{case}\n\nThe same again: PROPTEST_RNG_SEED={seed} PROPTEST_CASES={cases}"
        ),
        Err(aborted) => panic!("{aborted}"),
    }
}

fn live_through(case: &Case) {
    let mut node = Node::new(case.dice);
    if case.loaded {
        node.load_all();
    }
    for transition in &case.transitions {
        node.go(transition);
    }
    node.finish();
}
