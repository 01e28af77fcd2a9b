//! The machines against each other, in virtual time: no sockets, no threads, integers for
//! descriptors.

mod activity;
mod adoption;
mod bugs;
mod chaos;
mod ends;
mod hostile;
mod inventory;
mod limits;
mod lost;
mod model;
mod publish;
mod publishing;
mod query;
mod release;
mod renewal;
mod retry;
mod scripted;
mod serving;
mod supervision;
mod words;

use weightd_core::testing::{host, ledger, socket, world};
