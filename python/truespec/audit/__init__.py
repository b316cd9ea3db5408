"""Room of the audit: shows on a user's own model and drafter that speculation changes nothing."""

from truespec.audit.audit import AuditReport, RequestAudit, audit

__all__ = ["AuditReport", "RequestAudit", "audit"]
