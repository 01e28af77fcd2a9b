//! The conformance suite: one list of scenarios, for every pair of a runtime's client and a runtime's server, and for
//! the bare machines in virtual time.
//!
//! A new runtime is done when it passes: implement `Runtime`, say in `weightd_tests::runtimes` what runs its
//! futures, and add a line below.

mod fairness;
mod impostor;
mod pair;
mod scenarios;
mod stage;
mod talk;
mod virtual_time;

// The world of the core's own tests.
#[allow(dead_code)]
#[path = "../../../core/tests/machines/host.rs"]
mod host;
#[allow(dead_code)]
#[path = "../../../core/tests/machines/ledger.rs"]
mod ledger;
#[allow(dead_code)]
#[path = "../../../core/tests/machines/wire.rs"]
mod wire;
#[allow(dead_code)]
#[path = "../../../core/tests/machines/world/mod.rs"]
mod world;

mod machines {
    crate::scenarios::every_scenario! { crate::virtual_time::Virtual }

    #[test]
    fn a_daemon_that_is_gone_is_lost() {
        crate::scenarios::leases::a_daemon_that_is_gone_is_lost::<crate::virtual_time::Virtual>();
    }
}

/// Each with each, as `engine::RUNTIME::server::RUNTIME`.
macro_rules! every_pair {
    ($($name:ident: $runtime:ident)*) => {
        every_pair! { @ [$($name: $runtime)*] [$($name: $runtime)*] }
    };
    (@ [$($name:ident: $runtime:ident)*] $servers:tt) => {
        mod engine {
            $(mod $name {
                pub use weightd_tests::runtimes::$runtime as Engine;
                every_pair! { @ $servers }
            })*
        }
    };
    (@ [$($name:ident: $runtime:ident)*]) => {
        // All servers at once, since it is mostly waiting.
        #[test]
        fn a_daemon_that_is_gone_is_lost() {
            std::thread::scope(|threads| {
                $(std::thread::Builder::new()
                    .name(format!("{}::server::{}", module_path!(), stringify!($name)))
                    .spawn_scoped(threads, || {
                        type Stage = crate::pair::Pair<Engine, weightd_tests::runtimes::$runtime>;
                        crate::scenarios::leases::a_daemon_that_is_gone_is_lost::<Stage>();
                    })
                    .expect("a thread");)*
            });
        }

        mod server {
            $(mod $name {
                type Stage = crate::pair::Pair<super::super::Engine, weightd_tests::runtimes::$runtime>;
                crate::scenarios::every_scenario! { super::Stage }
            })*
        }
    };
}

every_pair! {
    blocking: Blocking
    tokio: OnTokio
    smol: OnSmol
}
