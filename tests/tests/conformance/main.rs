//! The conformance suite: one list of scenarios, for every pair of a runtime's client and a runtime's server, and for
//! the bare machines in virtual time.
//!
//! A new runtime is done when it passes: implement `Runtime`, say in `weightd_tests::runtimes` what runs its
//! futures, and add a line below.

mod fairness;
mod impostor;
mod listeners;
mod pair;
mod scenarios;
mod stage;
mod talk;
mod virtual_time;

// The world of the core's own tests.
use weightd_core::testing::{host, ledger, world};

mod machines {
    crate::scenarios::every_scenario! { crate::virtual_time::Virtual }
    crate::scenarios::every_slow_scenario! { crate::virtual_time::Virtual }
}

/// Each with each, as `engine::RUNTIME::server::RUNTIME`.
macro_rules! every_pair {
    ($($name:ident: $runtime:ident)*) => {
        every_pair! { @ [$($name: $runtime)*] [$($name: $runtime)*] }
    };
    (@ [$($name:ident: $runtime:ident)*] $servers:tt) => {
        mod engine {
            $(pub mod $name {
                pub use weightd_tests::runtimes::$runtime as Engine;
                every_pair! { @ $servers }
            })*
        }

        // All at once, since they are mostly waiting: each in a thread by its name.
        #[test]
        fn what_takes_its_time_on_every_pair() {
            scenarios::at_once([$(engine::$name::slow()),*].into_iter().flatten());
        }
    };
    (@ [$($name:ident: $runtime:ident)*]) => {
        pub fn slow() -> Vec<(String, fn())> {
            [$(server::$name::slow()),*].concat()
        }

        mod server {
            $(pub mod $name {
                type Stage = crate::pair::Pair<super::super::Engine, weightd_tests::runtimes::$runtime>;
                crate::scenarios::every_scenario! { super::Stage }

                pub fn slow() -> Vec<(String, fn())> {
                    crate::scenarios::slow::<Stage>(module_path!())
                }
            })*
        }
    };
}

every_pair! {
    blocking: Blocking
    tokio: OnTokio
    smol: OnSmol
}
