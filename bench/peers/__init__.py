"""What hone is measured beside; one file each, written as their own users would."""
